"""How much memory a cell's process needs: an estimate that refuses packings which cannot work.

Slightly high by intention. Every term is a formula over the sizes of a model and of a batch; the sum counts what a
process holds and what it frees again but does not give back, since neither the C heap nor CUDA's caching allocator
returns freed blocks to others.

Notation: N parameters, b bytes a parameter, T tokens a sequence (prompt and completion), V vocabulary, h hidden size.
All sizes are in bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stalefront.build import VALIDATION_CHUNK
from stalefront.preflight import SAMPLING, is_plain
from stalefront.ranks import BUCKET

if TYPE_CHECKING:
    from stalefront.cell import Cell
    from stalefront.model import Model

GIB = 2**30
FLOAT32 = 4
# Entries of `mismatch` that run a module in 16 bits.
HALVES = ("bf16", "fp16")
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
# A process with its imports and a tiny model. Measured: 412 MiB native in a fresh interpreter, 345 MiB forked from the
# warm parent, 412 MiB forked with trl.
PROCESS = {"native": GIB // 2, "trl": 5 * GIB // 8}
# What CUDA's libraries add to a process, and its context and library workspaces on the device. Not measured here.
CUDA_HOST, CUDA_CONTEXT = 2 * GIB, 3 * GIB // 4
# Flat float32 vectors of the updater: kept from step to step (start, previous gradient and update), and at the peak of
# a step (gradient, before, after, difference, and the temporaries of a check for non-finite entries).
HELD_VECTORS, STEP_VECTORS = 3, 6
# The same for controllers that look at or change the step.
CONTROLLER_VECTORS = {"gac": 2, "update_cap": 2}
# Forms of the logits at the peak of a backward: raw, log-probs, three gradients, one temporary.
LOGIT_FORMS = 6
# A token's logits while it is drawn: raw, scaled and log-probs in float32, and three forms in float64.
DRAW_BYTES = 40
# Columns of a rollout batch: three of 8 bytes, five of 4, two of 1 a token, and seven of 8 and one of 1 a sequence.
TOKEN_BYTES, SEQUENCE_BYTES = 46, 57
# Ids that a truncated sampler keeps at one place, where they are recorded. Assumed: top-p keeps tens, rarely more.
KEPT_IDS = 256


@dataclass(frozen=True)
class CellMemory:
    """Peak memory of one cell's process: on the host, and on its CUDA device (0 without one)."""

    host_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes
    ----------
    state_entries : int
        Entries of the state dict, where tied weights count twice.
    intermediate : int
        Width of a feed-forward block; of all active experts together.
    eager : bool
        Attention weights are stored.
    route_bytes : int
        What the experts chosen for one token take, over all layers; 0 without routers that are understood.
    """

    parameters: int
    state_entries: int
    vocab: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eager: bool
    route_bytes: int = 0


@dataclass(frozen=True)
class Lengths:
    """Tokens of a task's longest prompt and, for a warm-up, of its longest answer."""

    prompt: int
    answer: int


def cell_bytes(cell: Cell) -> CellMemory | None:
    """Estimated peak of `cell`'s process.

    None where the sizes of the model or of its prompts cannot be known without a download: a hub id whose
    configuration or tokenizer is not in the local cache, or one whose classes this transformers does not have. Nothing
    is ever downloaded, and no weights are read.

    Notes
    -----
    Of a cell that several ranks share it is what each of their processes needs, with a device of its own.

    On the CPU, and on a Mac, where both share one memory, everything counts as the host's. Engine `trl` is taken to
    need what the native one does, without checkpoints. A resumed cell holds nothing on top: what was loaded is gone
    before its first step.

    Measured on the CPU, cells that were not resumed: SmolLM2-135M with task=additions 9.79 GB, estimated 12.1 (engine
    trl 8.45, estimated 10.5); a Llama of 27 million parameters 2.40 GB, estimated 2.95, with a warm-up 2.12 (2.95); the
    tiny model 0.36 GB, estimated 0.55. Nothing was measured on a CUDA device.
    """
    shape, lengths = model_shape(cell.model), prompt_lengths(cell)
    if shape is None or lengths is None:
        return None
    tensors = max(training_bytes(cell, shape, lengths), warmup_bytes(cell, shape, lengths))
    process = PROCESS.get(cell.engine.choice(), PROCESS["native"])
    if not cell.device.startswith("cuda"):
        return CellMemory(process + tensors, 0)
    host = process + CUDA_HOST + loading_bytes(shape.parameters, WIDTHS[cell.model.dtype])
    return CellMemory(host, CUDA_CONTEXT + tensors)


def training_bytes(cell: Cell, shape: ModelShape, lengths: Lengths) -> int:
    """Tensors of the learner loop: what is held throughout, and the larger one of a learner step and sampling."""
    width, task = WIDTHS[cell.model.dtype], cell.task
    sequences = task.num_prompts * task.num_generations
    tokens = lengths.prompt + task.max_completion_length
    ranks = cell.model.ranks
    rows = -(-sequences // (cell.delay.parts_per_batch * cell.optimizer.grad_accum * ranks))
    held = (
        weights_bytes(shape.parameters, width)
        + gradient_bytes(shape.parameters, width)
        + optimizer_bytes(shape.parameters, width, cell.optimizer.kind)
        + updater_bytes(shape.parameters)
        + controllers_bytes(shape.parameters, [controller.choice() for controller in cell.controller])
        + (average_bytes(shape.parameters, width) if cell.proximal.needs_average else 0)
        + versions_bytes(shape, width, cell.kept_versions)
        + sampler_bytes(cell, shape)
        + batches_bytes(sequences, tokens, cell.delay.queue_batches, token_bytes(cell, shape))
        + ranks_bytes(shape, width, ranks)
    )
    # Logits start at the column before the first completion token.
    learn = activation_bytes(shape, rows, tokens, width) + logits_bytes(rows, task.max_completion_length + 1, shape)
    drawn = max(-(-sequences // ranks), min(-(-cell.validation.num_samples // ranks), VALIDATION_CHUNK))
    ways = 2 if any(entry.place == "path" and entry.strength != 1 for entry in cell.mismatch) else 1
    return held + max(learn, ways * sampling_bytes(shape, drawn, tokens, width))


def warmup_bytes(cell: Cell, shape: ModelShape, lengths: Lengths) -> int:
    """Tensors of the supervised warm-up, 0 without one: model, gradient, AdamW's moments, one batch with all logits."""
    options, width = cell.model.warmup, WIDTHS[cell.model.dtype]
    if options is None:
        return 0
    rows, tokens = options.batch_size, lengths.prompt + lengths.answer + 1
    batch = activation_bytes(shape, rows, tokens, width) + logits_bytes(rows, tokens, shape)
    return 2 * shape.parameters * width + optimizer_bytes(shape.parameters, width, "adamw") + batch


def weights_bytes(parameters: int, width: int) -> int:
    """2 N b: the model and the reference."""
    return 2 * parameters * width


def gradient_bytes(parameters: int, width: int) -> int:
    """N b."""
    return parameters * width


def optimizer_bytes(parameters: int, width: int, kind: str) -> int:
    """2 N b for AdamW's two moments; 0 for `sgd` and `nsgd`, which have no momentum."""
    return 2 * parameters * width if kind == "adamw" else 0


def updater_bytes(parameters: int) -> int:
    """4 N (3 + 6): flat float32 vectors, held and within a step (`HELD_VECTORS`, `STEP_VECTORS`)."""
    return FLOAT32 * parameters * (HELD_VECTORS + STEP_VECTORS)


def versions_bytes(shape: ModelShape, width: int, kept: int) -> int:
    """b N (K + 2) for K > 0 kept versions: a module to run them in, and K + 1 versions, in which tied weights are one
    tensor; 0 for K = 0.
    """  # fmt: skip
    return width * shape.parameters * (kept + 2) if kept else 0


def controllers_bytes(parameters: int, names: Sequence[str]) -> int:
    """4 N for each flat vector that a controller makes within a step: the gradient and what is left of it, or Δθ."""
    return FLOAT32 * parameters * sum(CONTROLLER_VECTORS.get(name, 0) for name in names)


def average_bytes(parameters: int, width: int) -> int:
    """N b for the module that runs an average of the weights, and 4 N for the average where that is not float32."""
    return parameters * (width if width == FLOAT32 else width + FLOAT32)


def batches_bytes(sequences: int, tokens: int, waiting: int, token: int = TOKEN_BYTES) -> int:
    """(Q + 2) B (46 T + 57): Q batches that wait, one in use, one being made; more a token with routes or kept ids."""
    return (waiting + 2) * sequences * (token * tokens + SEQUENCE_BYTES)


def token_bytes(cell: Cell, shape: ModelShape) -> int:
    """46, and the experts of the sampler and of the trainer, and ids of 4 bytes where the sampler's support is kept."""
    kept = any(getattr(entry, "keep_mask", False) for entry in cell.mismatch)
    return TOKEN_BYTES + 2 * shape.route_bytes + (FLOAT32 * min(shape.vocab, KEPT_IDS) if kept else 0)


def sampler_bytes(cell: Cell, shape: ModelShape) -> int:
    """N b for each module of the sampler's own: with other weights or another head, in 16 bits, with older weights."""
    width, entries = WIDTHS[cell.model.dtype], cell.mismatch
    own = any(entry.own_module for entry in entries) or cell.model.fp32_head == "trainer"
    older = any(entry.older_pushes for entry in entries)
    half = any(entry.choice() in HALVES for entry in entries)
    return shape.parameters * (width * (own + older) + WIDTHS["bfloat16"] * half)


def ranks_bytes(shape: ModelShape, width: int, ranks: int) -> int:
    """b · max(bucket, V h): the part of the gradient that ranks sum in one go; 0 for a single rank."""
    return width * max(BUCKET, shape.vocab * shape.hidden) if ranks > 1 else 0


def logits_bytes(rows: int, columns: int, shape: ModelShape) -> int:
    """6 · 4 · rows · columns · V: forms of the logits in float32 at the peak of a backward (`LOGIT_FORMS`)."""
    return LOGIT_FORMS * FLOAT32 * rows * columns * shape.vocab


def activation_bytes(shape: ModelShape, rows: int, tokens: int, width: int) -> int:
    """Tensors that a forward keeps for its backward; there is no checkpointing.

    layers · rows · T · (4 · 6 h + b · 6 q + b · 4 i), where q = heads · head size and i is the feed-forward width: a
    block keeps three float32 tensors of h for each of its two norms (input, normalised, scaled), six of the width of
    its queries (queries, keys and values repeated to their number, output, its contiguous form, one temporary), and
    four of its feed-forward (gate, its activation, up, their product). With attention weights stored, also
    layers · rows · heads · T² · (4 + b): the softmax in float32 and its form in the model's type.
    """
    query = shape.heads * shape.head_dim
    token = FLOAT32 * 6 * shape.hidden + width * (6 * query + 4 * shape.intermediate)
    weights = shape.heads * tokens * (FLOAT32 + width) if shape.eager else 0
    return shape.layers * rows * tokens * (token + weights)


def cache_bytes(shape: ModelShape, rows: int, tokens: int, width: int) -> int:
    """rows · T · layers · 2 · key-value heads · head size · b: keys and values of every position."""
    return rows * tokens * shape.layers * 2 * shape.kv_heads * shape.head_dim * width


def sampling_bytes(shape: ModelShape, rows: int, tokens: int, width: int) -> int:
    """Two caches, a block's activations and rows · V · 40.

    The cache grows by concatenation, which leaves freed blocks of about its own size; the prefill runs without
    gradients, so that one block's tensors exist at a time.
    """
    block = activation_bytes(shape, rows, tokens, width) // shape.layers
    return 2 * cache_bytes(shape, rows, tokens, width) + block + rows * shape.vocab * DRAW_BYTES


def loading_bytes(parameters: int, width: int) -> int:
    """N (b + 4): a model on its way to the device, beside one in float32, the form that copies are built in."""
    return parameters * (width + FLOAT32)


_SHAPES: dict[str, ModelShape | None] = {}
_LENGTHS: dict[str, Lengths | None] = {}


def model_shape(model: Model) -> ModelShape | None:
    """Sizes of `model`, found once a model of a launch; None where they are not known without a download."""
    key = json.dumps([model.checkpoint, model.gguf_file, model.config], sort_keys=True)
    if key not in _SHAPES:
        if model.config is not None and is_plain(model.config):
            _SHAPES[key] = plain_shape(model.config)
        else:
            try:
                _SHAPES[key] = _inspected_shape(_local(model))
            except (OSError, ValueError):
                _SHAPES[key] = None
    return _SHAPES[key]


def plain_shape(config: dict[str, Any]) -> ModelShape:
    """Sizes of a Llama of the usual keys (see `preflight.is_plain`), without importing torch.

    N = V h (twice untied) + layers (2 h² + 2 h k + 3 h i + 2 h) + h, where k is the width of the keys.
    """
    vocab, hidden, inner = (config[key] for key in ("vocab_size", "hidden_size", "intermediate_size"))
    layers, heads, kv_heads = (
        config[key] for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = hidden // heads
    block = 2 * hidden**2 + 2 * hidden * kv_heads * head_dim + 3 * hidden * inner + 2 * hidden
    entries = 2 * vocab * hidden + layers * block + hidden
    return ModelShape(
        parameters=entries - (vocab * hidden if config["tie_word_embeddings"] else 0),
        state_entries=entries,
        vocab=vocab,
        layers=layers,
        hidden=hidden,
        intermediate=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eager=False,
    )


def _local(model: Model) -> Model:
    """The same model from its folder in the hub's cache; raises `OSError` or `ValueError` where it is not there."""
    if not model.is_hub_id:
        return model
    from huggingface_hub import snapshot_download

    return dataclasses.replace(model, checkpoint=snapshot_download(str(model.checkpoint), local_files_only=True))


def _inspected_shape(model: Model) -> ModelShape:
    """Sizes of a model that is put up without memory for its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    # A checkpoint's configuration is complete, and reading a tokenizer out of a GGUF file takes long.
    no_tokenizer: Any = None
    config = model.hf_config(no_tokenizer if model.config is None else model.tokenizer())
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    return ModelShape(
        parameters=sum(p.numel() for p in built.parameters()),
        state_entries=sum(value.numel() for value in built.state_dict().values()),
        vocab=int(text.vocab_size),
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        intermediate=_intermediate(text),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        eager=built.config._attn_implementation == "eager",
        route_bytes=_route_bytes(built, text),
    )


def _route_bytes(built: Any, text: Any) -> int:
    """Bytes a token of the experts of all layers; 0 where routes cannot be recorded."""
    from stalefront.routing import RoutingError, find_routers, route_bytes_per_token

    try:
        layers = len(find_routers(built))
    except RoutingError:
        return 0
    return route_bytes_per_token(layers, int(getattr(text, "num_experts_per_tok", None) or 1))


def _intermediate(text: Any) -> int:
    """Width of the feed-forward block: declared, four times the hidden size, or of the experts a token goes to."""
    experts = getattr(text, "num_experts_per_tok", None) or 1
    one = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    return int(experts) * int(one or 4 * text.hidden_size)


def prompt_lengths(cell: Cell) -> Lengths | None:
    """Longest prompt and answer, found once a pair of a model and a task; None like `model_shape`."""
    fields = {k: v for k, v in cell.task.as_dict().items() if k not in (*SAMPLING, "max_completion_length")}
    model = cell.model
    warm = model.warmup is not None
    key = json.dumps([model.checkpoint, model.gguf_file, model.config is None, warm, fields], sort_keys=True)
    if key not in _LENGTHS:
        try:
            _LENGTHS[key] = _measured_lengths(cell)
        except (OSError, ValueError):
            _LENGTHS[key] = None
    return _LENGTHS[key]


def _measured_lengths(cell: Cell) -> Lengths:
    rows = cell.task.rows_to_check(cell.seed)
    answers = [str(row["answer"]) for row in rows] if cell.model.warmup is not None else [""]
    if cell.model.config is not None:
        # One token a character; without a template the tokenizer is left alone, so that none has to be made.
        no_tokenizer: Any = None
        return Lengths(max(len(cell.task.render(row, no_tokenizer)) for row in rows), max(map(len, answers)))
    tokenizer = _local(cell.model).tokenizer()
    spoken = tokenizer(answers, add_special_tokens=False)["input_ids"]
    return Lengths(max(map(len, cell.task.encode(rows, tokenizer))), max(map(len, spoken)))
