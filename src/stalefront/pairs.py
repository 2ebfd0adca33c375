"""Pairs of options that no single option can judge: what cannot work, counts something twice, or can never act."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stalefront.choice import OptionError
from stalefront.correction import RatioCorrection

if TYPE_CHECKING:
    from stalefront.cell import Cell
    from stalefront.correction import Correction
    from stalefront.mismatch import Mismatch


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
    held = {} if cell.loss.ratio is None else {f"loss={cell.loss.choice()}": truly(cell, cell.loss.ratio)}
    for place, correction in enumerate(cell.correction):
        _check_needs(correction)
        _check_scope(cell, correction)
        _check_normalize(cell.correction[:place], correction)
        if isinstance(correction, RatioCorrection):
            _check_anchor(cell, correction, held)
            if correction.is_weight:
                held[f"correction.{correction.choice()}"] = truly(cell, correction.anchor)
    _check_whole(cell)
    for controller in cell.controller:
        controller.refuse(cell)
    check_mismatch(cell)
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
    if anchor == "old/mu":
        _check_old_over_mu(cell, field)
    for holder, ratio in held.items():
        if not correction.is_weight or not legs(ratio) & legs(truly(cell, anchor)):
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


def _check_old_over_mu(cell: Cell, field: str) -> None:
    """A ratio that is 1 by construction corrects nothing."""
    proximal, names = cell.proximal.choice(), [entry.choice() for entry in cell.mismatch if shows(entry)]
    if proximal == "engine":
        reason = "With proximal=engine old is what the sampler wrote down, so that old/mu is 1."
    elif proximal == "recompute" and names == ["parity"]:
        reason = "With mismatch=[parity] old/mu is 1."
    elif proximal == "recompute" and not names and cell.model.dtype == "float32":
        reason = "Without mismatch that is logged old/mu is 1: add an entry to mismatch."
    else:
        return
    raise OptionError(field, "old/mu", "theta/mu or theta/old", f"{reason} The correction would never act.")


def shows(entry: Mismatch) -> bool:
    """Whether an entry moves what is written down away from what the trainer computes."""
    return entry.strength > 0 and getattr(entry, "logged", "processed") == "processed"


def truly(cell: Cell, ratio: str) -> str:
    """What a ratio compares: where old is the number that the sampler wrote down, θ/old is θ/μ."""
    return "theta/mu" if ratio == "theta/old" and cell.proximal.choice() == "engine" else ratio


def legs(anchor: str) -> set[str]:
    """What a ratio holds: θ/old the lag, old/μ the mismatch, θ/μ both."""
    return {"theta/old": {"lag"}, "old/mu": {"mismatch"}, "theta/mu": {"lag", "mismatch"}}[anchor]


def check_mismatch(cell: Cell) -> None:
    """Refuse entries, heads and replays that could never act, or that have nothing to act on."""
    names = [entry.choice() for entry in cell.mismatch]
    if cell.target_kl is not None:
        legal = "null, or a finite number of at least 0: nats a token"
        if not (math.isfinite(cell.target_kl) and cell.target_kl >= 0):
            raise OptionError("mismatch.target_kl", cell.target_kl, legal, "0 is none.")
        if not any(entry.strength for entry in cell.mismatch):
            way_out = "Give mismatch=[logit_noise], for example."
            raise OptionError(
                "mismatch.target_kl", cell.target_kl, "null without an entry that has a strength", way_out
            )
    for entry in cell.mismatch:
        entry.refuse(cell)
    if cell.replay.acts and names == ["parity"]:
        way_out = "Sampler and trainer choose the same experts there."
        raise OptionError("replay", cell.replay.choice(), "none with mismatch=[parity]", way_out)
    _check_types(cell, names)
    _check_head(cell, names)


def _check_types(cell: Cell, names: Sequence[str]) -> None:
    """An entry that rounds to the type the model has anyway."""
    same = {"bfloat16": ("bf16", "bf16_weights"), "float16": ("fp16",)}.get(cell.model.dtype, ())
    for name in set(names) & set(same):
        raise OptionError(
            "mismatch", names, f"a list without {name} at model.dtype={cell.model.dtype}", "It does nothing."
        )


def _check_head(cell: Cell, names: Sequence[str]) -> None:
    """A float32 head needs something that is not."""
    value, dtype = cell.model.fp32_head, cell.model.dtype
    if value != "none" and dtype == "float32" and (value == "trainer" or not {"bf16", "fp16"} & set(names)):
        way_out = "At model.dtype=float32 the trainer's head is in float32 already; both acts on mismatch=[bf16]."
        raise OptionError("model.fp32_head", value, "none", way_out)
    for entry in cell.mismatch:
        if entry.place == "head" and getattr(entry, "dtype", None) == dtype and not {"bf16", "fp16"} & set(names):
            way_out = "The sampler's head computes in it already."
            raise OptionError(entry.key("dtype"), dtype, "another type than model.dtype", way_out)
