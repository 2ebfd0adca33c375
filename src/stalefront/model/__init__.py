"""Group `model`: any `AutoModelForCausalLM`, from a checkpoint or built from a configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stalefront.choice import Choice, OptionError, is_count
from stalefront.digest import model_digest

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# The two special tokens that a character vocabulary starts with.
PAD, EOS = "<pad>", "<eos>"


@dataclass(frozen=True)
class Warmup(Choice):
    """Supervised warm-up on the task's answers by a noisy expert; its result is π₀ and the KL reference.

    Every answer token is replaced, with probability `noise`, by one drawn uniformly from the answers' tokens, so
    that the warmed-up policy passes sometimes and not always. AdamW, the rate falls linearly to 0.
    """

    steps: int
    batch_size: int
    lr: float
    noise: float

    @classmethod
    def key(cls, field: str) -> str:
        """Override key of `field`."""
        return f"model.warmup.{field}"

    def check(self) -> None:
        """Ranges of every field."""
        self.require(is_count(self.steps), "steps", "a whole number of at least 1", "model.warmup=null for none.")
        self.require(is_count(self.batch_size), "batch_size", "a whole number of at least 1")
        self.require(math.isfinite(self.lr) and self.lr > 0, "lr", "a finite number above 0")
        self.require(0 <= self.noise <= 1, "noise", "a probability")


@dataclass(frozen=True)
class Model(Choice):
    """Where weights and tokenizer come from.

    Exactly one of `checkpoint` (hub id or folder; with `gguf_file`, a GGUF file inside it) and `config` (keyword
    arguments of `AutoConfig.for_model`, `model_type` included) is set. A model built from `config` has fresh weights
    and a character tokenizer over `alphabet`.

    Every one of the `ranks` processes of a cell holds the whole model and computes its part of the rows. Sums over rows
    are taken in another order then, so their number is part of the identity.

    `fp32_head` makes the language-model head compute in float32, in the trainer alone or in the sampler as well;
    parameters keep their type. With `deterministic_topk` experts of equal scores are chosen by the lowest index.

    A cell is identified by what a local checkpoint holds, wherever it lies (see `stalefront.digest.model_digest`: of
    files above one megabyte the size and both ends are looked at), and by the name of one on a hub.
    """

    checkpoint: str | None
    gguf_file: str | None
    config: dict[str, Any] | None
    alphabet: str | None
    dtype: Literal["float32", "bfloat16", "float16"]
    warmup: Warmup | None
    ranks: int
    fp32_head: Literal["none", "trainer", "both"]
    deterministic_topk: bool

    def check(self) -> None:
        """One source of weights, and it is there; at least one rank."""
        self.require(is_count(self.ranks), "ranks", "a whole number of at least 1")
        one = (self.checkpoint is None) != (self.config is None)
        self.require(one, "checkpoint", "set exactly when model.config is null", "Set one of the two.")
        if self.config is not None:
            self.require("model_type" in self.config, "config", "a mapping with model_type, for example llama")
            legal = "the characters of the task, each once, for a model built from model.config"
            alphabet = self.alphabet or ""
            self.require(0 < len(alphabet) == len(set(alphabet)), "alphabet", legal)
            self._check_config()
        if self.checkpoint is not None:
            self._check_checkpoint(self.checkpoint)

    def _check_config(self) -> None:
        assert self.config is not None
        size = self.config.get("vocab_size")
        needed = len(self.alphabet or "") + 2
        legal = f"at least {needed}: the alphabet and the two special tokens"
        if not (isinstance(size, int) and size >= needed):
            raise OptionError("model.config.vocab_size", size, legal)

    def _check_checkpoint(self, checkpoint: str) -> None:
        """A local checkpoint must exist; a hub id is looked up when the sweep is validated (see `preflight`)."""
        folder = Path(checkpoint).expanduser()
        hub_like = checkpoint.count("/") == 1 and not checkpoint.startswith((".", "/", "~"))
        legal = "a folder with a model in it, or a hub id of the form owner/name"
        way_out = "Check the path; a relative one starts from the folder the sweep is launched in."
        self.require(folder.is_dir() or hub_like, "checkpoint", legal, way_out)
        if folder.is_dir():
            name = self.gguf_file or "config.json"
            field = "gguf_file" if self.gguf_file else "checkpoint"
            self.require((folder / name).is_file(), field, f"present: {folder / name} is no file")

    def identity(self) -> dict[str, Any]:
        """`content`, a hash of the files, in the place of a checkpoint's path and of its GGUF file's name."""
        found, local = super().identity(), self.sources()
        if not local:
            return found
        content = {"content": model_digest(local["checkpoint"])}
        return {k: v for k, v in found.items() if k not in ("checkpoint", "gguf_file")} | content

    def sources(self) -> dict[str, Path]:
        """The folder of a local checkpoint, or the GGUF file in it."""
        if self.checkpoint is None or self.is_hub_id:
            return {}
        folder = Path(self.checkpoint).expanduser()
        return {"checkpoint": folder / self.gguf_file if self.gguf_file else folder}

    @property
    def is_hub_id(self) -> bool:
        """True when the checkpoint has to come from a model hub."""
        return self.checkpoint is not None and not Path(self.checkpoint).expanduser().is_dir()

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the parameters."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer with a padding token, padding on the left."""
        from transformers import AutoTokenizer

        if self.checkpoint is None:
            return character_tokenizer(self.alphabet or "")
        source = {"gguf_file": self.gguf_file} if self.gguf_file else {}
        tokenizer = AutoTokenizer.from_pretrained(str(Path(self.checkpoint).expanduser()), **source)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.padding_side = "left"
        return tokenizer

    def build(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
        """Model with its starting weights (before any warm-up), in evaluation mode."""
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        if self.checkpoint is not None:
            source: dict[str, Any] = {}
            if self.gguf_file:
                # A plain dense model: weights left in GGUF blocks, the default where kernels allow, cannot be trained.
                source = {"gguf_file": self.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
            model = AutoModelForCausalLM.from_pretrained(
                str(Path(self.checkpoint).expanduser()), dtype=self.torch_dtype, **source
            )
            return model.eval()
        config = self.hf_config(tokenizer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=self.torch_dtype)
        return model.eval()

    def hf_config(self, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
        """Configuration of transformers: the checkpoint's, or the one that `config` describes."""
        from transformers import AutoConfig

        if self.checkpoint is not None:
            source = {"gguf_file": self.gguf_file} if self.gguf_file else {}
            return AutoConfig.from_pretrained(str(Path(self.checkpoint).expanduser()), **source)
        options = dict(self.config or {})
        tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        return AutoConfig.for_model(options.pop("model_type"), **tokens, **options)


def clean_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Fresh module of the same architecture holding a copy of `model`'s weights.

    Built from the configuration and never by `deepcopy`: a patched forward of a copied module can go on calling the
    live weights. The copy's parameters go on requiring gradients, although nothing ever asks for any: some CPU
    kernels choose their path by that flag, and the last bits of equal weights would differ. Every tensor has the type
    of its model: rotary frequencies of a model in 16 bits are buffers in float32, and are no part of its state.
    """
    copy = type(model)(model.config)
    for mine, live in zip(copy.parameters(), model.parameters(), strict=True):
        mine.data = mine.data.to(live)
    for kept, buffer in zip(copy.buffers(), model.buffers(), strict=True):
        kept.data = buffer.clone()
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerBase:
    """One token a character of `alphabet`, after the padding and the end token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    # No token stands for the unknown: a character outside the alphabet raises, it must not pass for padding.
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, padding_side="left", clean_up_tokenization_spaces=False
    )
