"""What a launch makes sure of before it starts or writes anything, beyond what a cell can tell by itself.

Importing torch and transformers takes seconds. A model built from a plain configuration with its character tokenizer
can be judged without them, and anything else is judged by what transformers makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stalefront.choice import OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stalefront.cell import Cell
    from stalefront.model import Model
    from stalefront.task import Row, Task

# Fields of a task that a prompt does not depend on.
SAMPLING = ("num_prompts", "num_generations", "temperature")
# A configuration with these keys and no other is judged by arithmetic (see `is_plain`).
COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings"),
)
PLAIN_KEYS = {"model_type", "tie_word_embeddings", *COUNTS}
POSITIONS = "max_position_embeddings"


def preflight(cells: Sequence[Cell], *, runs_here: bool = True) -> None:
    """Check devices, and every distinct pair of a model and a task once; the first problem is an `OptionError`.

    `runs_here` is False for cells that run on other machines: what devices this one has then says nothing.
    """
    for device in sorted({c.device for c in cells} - {"cpu"}):
        if runs_here:
            _check_device(device)
    models = {json.dumps([c.model.checkpoint, c.model.gguf_file]): c.model for c in cells if c.model.is_hub_id}
    for model in models.values():
        _check_hub(model)
    for cell in {json.dumps([cell.model.as_dict(), *routed(cell)], sort_keys=True): cell for cell in cells}.values():
        for field, value in routed(cell):
            _check_routed(cell.model, field, value)
    _check_widths(cells)
    for cell in {_pair(cell): cell for cell in cells}.values():
        if cell.model.config is not None:
            _check_built(cell.model, cell.task, cell.seed)
        else:
            _check_loaded(cell.model, cell.task, cell.seed)


def routed(cell: Cell) -> list[tuple[str, object]]:
    """Fields of a cell that need routers, with their values."""
    needed: list[tuple[str, object]] = []
    if cell.replay.acts:
        needed.append(("replay", cell.replay.choice()))
    if cell.model.deterministic_topk:
        needed.append(("model.deterministic_topk", True))
    experts = [entry.choice() for entry in cell.mismatch if entry.needs_experts]
    return needed + ([("mismatch", experts)] if experts else [])


def _check_routed(model: Model, field: str, value: object) -> None:
    """What acts on routers needs a model whose routers are understood; put up without memory for its weights."""
    legal = "without replay, entries on routers and a deterministic top-k for a model whose routers cannot be replayed"
    way_out = "See docs/routing.md for the families; model=tiny_moe is the smallest with experts."
    if model.config is not None and is_plain(model.config):
        raise OptionError(field, value, legal, f"A Llama has no routers. {way_out}")
    from stalefront.routing import RoutingError, find_routers

    built = _on_meta(model)
    try:
        find_routers(built)
    except RoutingError as error:
        raise OptionError(field, value, legal, f"{error} {way_out}") from error


def _on_meta(model: Model) -> PreTrainedModel:
    """The model, put up without memory for its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with refusing("model.checkpoint", model.checkpoint, "a causal language model with its configuration"):
        # A checkpoint's configuration is complete without a tokenizer, which takes long to read.
        no_tokenizer: Any = None
        config = model.hf_config(no_tokenizer if model.config is None else model.tokenizer())
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)


def _check_widths(cells: Sequence[Cell]) -> None:
    """Matrices that some entry shares out in groups must let it."""
    grouped = {
        json.dumps([cell.model.as_dict(), [entry.as_dict() for entry in cell.mismatch]], sort_keys=True): cell
        for cell in cells
        if any(getattr(entry, "group_size", None) for entry in cell.mismatch)
    }
    for cell in grouped.values():
        from stalefront.mismatch import Rounding
        from stalefront.sampler_module import check_widths

        check_widths(_on_meta(cell.model), [entry for entry in cell.mismatch if isinstance(entry, Rounding)])


def _pair(cell: Cell) -> str:
    """What the checks of a pair depend on; rows are looked at for one of the seeds."""
    task = {k: v for k, v in cell.task.as_dict().items() if k not in SAMPLING}
    return json.dumps([cell.model.as_dict(), task], sort_keys=True)


def _check_device(device: str) -> None:
    import torch

    kind, _, index = device.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count()} CUDA devices are here"
        raise OptionError("device", device, "cpu, or a CUDA device that is here", f"{found}.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise OptionError("device", device, "cpu, or mps on a machine that has it")


def _check_hub(model: Model) -> None:
    from transformers import AutoConfig

    # Of a repository with GGUF files, which has no config.json, the file itself is the configuration.
    source = {"gguf_file": model.gguf_file} if model.gguf_file else {}
    try:
        AutoConfig.from_pretrained(model.checkpoint, **source)
    except Exception as error:  # hub, network and parser each have their own
        legal = "a model that the hub, its local cache, or a folder has"
        told = (str(error).splitlines() or [type(error).__name__])[0]
        reason = f"There is no folder {model.checkpoint} here, and looking it up on the hub gave: {told}"
        raise OptionError("model.checkpoint", model.checkpoint, legal, reason) from error


def _check_built(model: Model, task: Task, seed: int) -> None:
    """A model with fresh weights and one token a character: texts are checked as they are."""
    if task.uses_template:
        way_out = "A model built from model.config has none: use task.format=plain, or model=pretrained."
        raise OptionError("task.format", "chat", "plain, for a tokenizer without a chat template", way_out)
    rows, alphabet = task.rows_to_check(seed), model.alphabet or ""
    # Without a template the tokenizer is left alone, so that none has to be made.
    no_tokenizer: Any = None
    prompts = [task.render(row, no_tokenizer) for row in rows]
    answers = [str(row["answer"]) for row in rows]
    spoken = model.warmup is not None or task.answer_is_completion
    _check_alphabet(alphabet, [*prompts, *answers] if spoken else prompts)
    _check_stop(task.stop_text(), alphabet)
    limit = _positions(model)
    needed = max(map(len, prompts)) + task.max_completion_length
    if model.warmup is not None:
        needed = max(needed, *(len(p) + len(a) + 1 for p, a in zip(prompts, answers, strict=True)))
    if limit is not None and needed > limit:
        way_out = "Raise it, or lower task.max_completion_length."
        legal = f"at least {needed}: the longest prompt and what follows it"
        raise OptionError(f"model.config.{POSITIONS}", limit, legal, way_out)


def _check_alphabet(alphabet: str, texts: Iterable[str]) -> None:
    missing = "".join(sorted(set().union(*texts) - set(alphabet)))
    if missing:
        shown = missing if len(missing) <= 40 else f"{missing[:40]}…"
        way_out = f"Missing: {shown!r}. Add them and raise model.config.vocab_size to match, or use model=pretrained."
        raise OptionError("model.alphabet", alphabet, "every character of the task's prompts and answers", way_out)


def _check_stop(stop: str | None, tokens: Iterable[str]) -> None:
    if stop is not None and not any(stop in token for token in tokens):
        way_out = "A completion ends at a token that contains it, and no token does: it would never end one."
        raise OptionError("task.stop", stop, "a text inside a single token of the vocabulary, or null", way_out)


def _positions(model: Model) -> int | None:
    """Positions that a model built from `model.config` has; refuses a configuration that gives no working model."""
    assert model.config is not None
    if is_plain(model.config):
        return int(model.config[POSITIONS])
    legal = "keyword arguments of AutoConfig.for_model that a causal language model can be built from"
    with refusing("model.config", model.config, legal):
        return _inspect(model, model.tokenizer())


def is_plain(config: dict[str, Any]) -> bool:
    """True for a Llama of the usual keys whose sizes fit together: the heads share out the width, in even parts."""
    counts = [config.get(key) for key in COUNTS]
    if config.keys() != PLAIN_KEYS or config["model_type"] != "llama":
        return False
    if type(config["tie_word_embeddings"]) is not bool:
        return False
    if not all(type(count) is int and count >= 1 for count in counts):
        return False
    width, heads, kv_heads = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    return bool(width % (2 * heads) == 0 and heads % kv_heads == 0)


def _inspect(model: Model, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Positions of a model, which is put up without memory for its weights; None where it declares no limit."""
    import torch
    from transformers import AutoModelForCausalLM

    config = model.hf_config(tokenizer)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    heads, kv_heads = (getattr(text, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    # Constructors accept this, and the first forward then fails.
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    limit = getattr(text, POSITIONS, None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _check_loaded(model: Model, task: Task, seed: int) -> None:
    """A checkpoint: whatever its tokenizer makes of the prompts."""
    with refusing("model.checkpoint", model.checkpoint, "a causal language model with its tokenizer"):
        tokenizer = model.tokenizer()
        limit = _inspect(model, tokenizer)
    lengths = _prompt_lengths(task, task.rows_to_check(seed), tokenizer)
    _check_stop(task.stop_text(), (tokenizer.decode([i]) for i in range(len(tokenizer))))
    if limit is not None and max(lengths) + task.max_completion_length > limit:
        longest = max(lengths)
        legal = f"at most {limit - longest}: the model has {limit} positions, the longest prompt {longest} tokens"
        way_out = "Lower it, shorten the prompts, or use another model."
        raise OptionError("task.max_completion_length", task.max_completion_length, legal, way_out)


def _prompt_lengths(task: Task, rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if task.uses_template and not getattr(tokenizer, "chat_template", None):
        way_out = "This model's tokenizer has none: use task.format=plain, or a model made for chat."
        raise OptionError("task.format", "chat", "plain, for a tokenizer without a chat template", way_out)
    field, value = ("task.format", "chat") if task.uses_template else ("task", task.choice())
    with refusing(field, value, "prompts that the tokenizer can render and encode"):
        return [len(ids) for ids in task.encode(rows, tokenizer)]


@contextmanager
def refusing(field: str, value: object, legal: str) -> Iterator[None]:
    """Turn any error inside into an `OptionError`: what libraries raise about bad input has no common type."""
    try:
        yield
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(field, value, legal, f"Trying it gave: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """What is told of an error: its innermost cause's type and first line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
