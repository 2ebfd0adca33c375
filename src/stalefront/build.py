"""From a cell to live objects, and the checks that no single option can make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stalefront.choice import OptionError
from stalefront.correction import RatioCorrection
from stalefront.ranks import SINGLE, Ranks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stalefront.cell import Cell
    from stalefront.correction import Correction
    from stalefront.rollout import Prompts, Sampler
    from stalefront.task import Row


# Prompts sampled side by side in a validation, a bound on memory. A row's random numbers do not depend on it; the last
# bits of its log-probs may, as with any shape of a forward.
VALIDATION_CHUNK = 128


@dataclass
class Parts:
    """Live objects of a cell.

    Attributes
    ----------
    model, reference
        The policy at π₀, and a frozen copy of it (the KL reference).
    minibatch_rows
        Rows of a rollout batch for each part it is cut into (outer) and each micro-batch of that part (inner).
    validation
        Held-out rows of this rank and their padded prompts, in chunks sampled side by side, each with the number of its
        first row among all; the same at every validation.
    ranks
        The processes that share the cell.
    """

    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    reference: PreTrainedModel
    sampler: Sampler
    minibatch_rows: list[list[torch.Tensor]]
    validation: list[tuple[int, list[Row], Prompts]]
    device: torch.device
    ranks: Ranks = SINGLE


def build(cell: Cell, cache: Path, ranks: Ranks = SINGLE) -> Parts:
    """Load or make the model, warm it up if asked for, and set up sampling; weights are those of the first rank."""
    import torch

    from stalefront.model import clean_copy
    from stalefront.rollout import Sampler
    from stalefront.warmup import start_model

    tokenizer = cell.model.tokenizer()
    model = start_model(cell, tokenizer, cache, ranks)
    ranks.take_from_first(list(model.state_dict().values()))
    sampler = Sampler(
        tokenizer,
        max_completion_length=cell.task.max_completion_length,
        temperature=cell.task.temperature,
        stop=cell.task.stop_text(),
        end_ids=end_ids(model, tokenizer),
    )
    device = torch.device(cell.device)
    held_out = cell.task.validation_rows(cell.seed, cell.validation.num_samples)
    mine = ranks.span(len(held_out))
    return Parts(
        tokenizer=tokenizer,
        model=model,
        reference=clean_copy(model),
        sampler=sampler,
        minibatch_rows=row_slices(cell, device),
        validation=[
            (mine.start + number * VALIDATION_CHUNK, chunk, sampler.pad(cell.task.encode(chunk, tokenizer), device))
            for number, chunk in enumerate(chunks(held_out[mine], VALIDATION_CHUNK))
        ],
        device=device,
        ranks=ranks,
    )


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a completion: the tokenizer's, and those of the model's generation configuration."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    listed = declared if isinstance(declared, list) else [declared]
    return sorted({int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None})


def chunks(rows: list[Row], size: int) -> list[list[Row]]:
    """`rows` in order, at most `size` at a time."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def row_slices(cell: Cell, device: torch.device) -> list[list[torch.Tensor]]:
    """Rows by part and by micro-batch: whole groups, in order."""
    import torch

    rows = torch.arange(cell.task.num_prompts * cell.task.num_generations, device=device)
    return [list(part.chunk(cell.optimizer.grad_accum)) for part in rows.chunk(cell.delay.parts_per_batch)]


def check_identity(cell: Cell, cell_id: str) -> None:
    """Raise `OptionError` when `cell`, read from its record, is not the cell that the id was made from.

    The record is the same, so the files it names are not: a cell must never run on other data than it was planned with.
    """
    if cell.cell_id == cell_id:
        return
    legal = f"what it was when cell {cell_id} was planned"
    for choice in (cell.model, cell.task):
        for field, path in choice.sources().items():
            way_out = f"{path.absolute()} or the record was edited: the sweep's command plans it as a new cell."
            raise OptionError(choice.key(field), str(getattr(choice, field)), legal, way_out)
    raise OptionError("cell_id", cell.cell_id, cell_id, "The record of this cell was edited: plan it again.")


def check_pairs(cell: Cell) -> None:
    """Refuse combinations of options that cannot work, count something twice, or can never act."""
    prompts, parts = cell.task.num_prompts, cell.delay.parts_per_batch
    if prompts % parts:
        legal = f"a divisor of task.num_prompts={prompts}"
        raise OptionError("delay.minibatches", parts, legal, "Parts are whole groups.")
    rows, pieces = prompts // parts * cell.task.num_generations, cell.optimizer.grad_accum
    if rows % pieces:
        raise OptionError("optimizer.grad_accum", pieces, f"a divisor of the {rows} sequences of a learner step")
    _check_ranks(cell)
    held = {} if cell.loss.ratio is None else {f"loss={cell.loss.choice()}": cell.loss.ratio}
    for place, correction in enumerate(cell.correction):
        _check_needs(correction)
        _check_scope(cell, correction)
        _check_normalize(cell.correction[:place], correction)
        if isinstance(correction, RatioCorrection):
            _check_anchor(cell, correction, held)
            if correction.is_weight:
                held[f"correction.{correction.choice()}"] = correction.anchor
    _check_whole(cell)
    for controller in cell.controller:
        controller.refuse(cell)
    cell.engine.refuse(cell)
    _check_rejection(cell)


def _check_rejection(cell: Cell) -> None:
    """What rejection means for a divisor or a baseline says nothing where no correction rejects anything."""
    for field, neutral in (("denominator", "valid"), ("advantages_over", "all")):
        value = getattr(cell.reduction, field)
        if value != neutral and not cell.correction:
            way_out = "Without a correction nothing is rejected, and the two are the same run."
            raise OptionError(f"reduction.{field}", value, neutral, way_out)


def _check_ranks(cell: Cell) -> None:
    """Ranks share out whole groups of every micro-batch, and the devices of their machine."""
    ranks, prompts = cell.model.ranks, cell.task.num_prompts
    if ranks == 1:
        return
    pieces = cell.delay.parts_per_batch * cell.optimizer.grad_accum
    if prompts % (pieces * ranks):
        groups = prompts // pieces if prompts % pieces == 0 else 1
        legal = ", ".join(str(n) for n in range(1, groups + 1) if groups % n == 0)
        way_out = (
            f"Or make task.num_prompts={prompts} a multiple of {pieces * ranks}: minibatches x grad_accum x ranks."
        )
        raise OptionError("model.ranks", ranks, f"{legal}: ranks share a micro-batch in whole groups", way_out)
    if cell.device not in ("cpu", "cuda"):
        raise OptionError("device", cell.device, f"cpu or cuda with model.ranks={ranks}", "A rank has its own device.")


# Optional fields of the loss inputs that the loop fills for the rules that need them.
RECORDED = frozenset({"reward_B", "group_B", "lag_BT", "entropy_behav_BT"})


def _check_needs(correction: Correction) -> None:
    """Nothing a rule looks at may be absent."""
    absent = sorted(set(correction.needs) - RECORDED)
    if absent:
        legal = f"rules that need nothing but {', '.join(sorted(RECORDED))}"
        raise OptionError("correction", correction.choice(), legal, f"It needs {', '.join(absent)}.")


def _check_scope(cell: Cell, correction: Correction) -> None:
    """A rule that compares the rows of a batch sees a whole learner step at once, or something else than it says."""
    if correction.scope != "batch":
        return
    way_out = f"correction={correction.choice()} compares all tokens of a learner step, which must not be split."
    for field, value in (("optimizer.grad_accum", cell.optimizer.grad_accum), ("model.ranks", cell.model.ranks)):
        if value > 1:
            raise OptionError(field, value, "1", way_out)


def _check_whole(cell: Cell) -> None:
    """A loss or a reduction that looks at a whole learner step at once, after the corrections, cannot be split."""
    reduction = cell.reduction
    whole = {
        reduction.key("denominator"): reduction.denominator == "kept",
        reduction.key("advantages_over"): reduction.advantages_over == "kept",
        "loss": cell.loss.scope == "batch",
    }
    split = {"optimizer.grad_accum": cell.optimizer.grad_accum, "model.ranks": cell.model.ranks}
    for option in (name for name, on in whole.items() if on):
        value = cell.loss.choice() if option == "loss" else "kept"
        for field, count in split.items():
            if count > 1:
                way_out = f"{option}={value} looks at all sequences of a learner step, which must not be split."
                raise OptionError(field, count, "1", way_out)


def _check_normalize(before: Sequence[Correction], correction: Correction) -> None:
    """Weights that are all 1 have nothing to normalise."""
    if correction.looks_at != "weight" or any(rule.is_weight for rule in before):
        return
    legal = "a place after a rule that weights tokens"
    way_out = f"All weights are 1 where correction={correction.choice()} stands, so it would never act."
    raise OptionError("correction", correction.choice(), legal, way_out)


def _check_anchor(cell: Cell, correction: RatioCorrection, held: Mapping[str, str]) -> None:
    """A mask may look at any ratio; a weight may not hold what the surrogate or a weight before it holds already.

    `held` has the ratios in use, by who holds them.
    """
    field, anchor = correction.key("anchor"), correction.anchor
    if anchor == "old/mu" and cell.proximal.choice() == "recompute":
        raise OptionError(
            field,
            anchor,
            "theta/mu or theta/old",
            "Without mismatch between sampler and trainer old/mu is 1, so the correction would never act.",
        )
    for holder, ratio in held.items():
        if not correction.is_weight or not legs(ratio) & legs(anchor):
            continue
        if holder.startswith("loss"):
            legal, way_out = "a ratio that the loss does not hold already", "use loss=reinforce, which has none."
        else:
            legal, way_out = "a ratio that no other weight holds already", "keep one of the two."
        raise OptionError(field, anchor, legal, f"{holder} holds {ratio}; {way_out}")
    if anchor == "theta/old" and cell.S == 1 and cell.proximal.choice() == "recompute":
        raise OptionError(
            field,
            anchor,
            "theta/mu",
            f"With delay={cell.delay.choice()} every step is on-policy: theta/old is 1, so it would never act.",
        )


def legs(anchor: str) -> set[str]:
    """What a ratio holds: θ/old the lag, old/μ the mismatch, θ/μ both."""
    return {"theta/old": {"lag"}, "old/mu": {"mismatch"}, "theta/mu": {"lag", "mismatch"}}[anchor]
