"""How strong a mismatch must be for a KL that is asked for: found before the first step, by sampling with π₀."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stalefront.choice import OptionError
from stalefront.inference import Place
from stalefront.policy import completion_logits, token_logps
from stalefront.ratios import token_statistic
from stalefront.support import kl_full

if TYPE_CHECKING:
    from stalefront.build import Parts
    from stalefront.cell import Cell
    from stalefront.inference import Engines, Inference

# Keys the random numbers of calibrations.
PURPOSE = "mismatch calibration"
# Relative error of the KL that ends the search, and the largest one where the KL jumps over what is asked for.
CLOSE, ACCEPTED = 0.01, 0.25
ROUNDS = 40
# A bracket as narrow as this, relative to its end, holds a jump and no better factor: one more expert flipped, say.
STEP = 1e-2
# Beyond this factor a strength that has no bound of its own is given up.
LARGEST = 1e9
# Prompts sampled, where whole batches allow, and entries of the distributions they may give: a bound on time, and on
# memory, since of a batch that gives more the first columns alone are looked at.
PROMPTS, ENTRIES = 64, 2**26
# The same for entries on routers: single flips have a large share in a mean over few tokens.
ROUTED_PROMPTS = 256


class Found(NamedTuple):
    """A factor on all strengths, and the KL that was measured with it (nats a token)."""

    factor: float
    kl_nats: float


def calibrate(cell: Cell, parts: Parts, inference: Inference) -> Found | None:
    """Set the strengths of `inference` for `cell.target_kl`; None where no KL is asked for.

    Of entries that change what is drawn it is KL(μ ‖ π₀) over the whole vocabulary, averaged over sampled places; of a
    list that changes nothing but the log or the text, the K3 of what is written down. The trainer's forward chooses its
    own experts, also where a cell replays others, so that replay is judged at one and the same mismatch.

    Raises
    ------
    OptionError
        If no strength gives it.
    """
    target = cell.target_kl
    if target is None:
        return None
    if target == 0:
        inference.scale(0.0)
        return Found(0.0, 0.0)
    # As far as the last of them goes along: beyond that a factor changes nothing.
    reach = max(entry.scaled(LARGEST).strength / entry.strength for entry in cell.mismatch if entry.strength)
    found = solve(lambda factor: measured_kl(cell, parts, inference, factor), target, min(reach, LARGEST))
    if not abs(found.kl_nats / target - 1) <= ACCEPTED:
        legal = f"what these entries reach with π₀; the closest is {found.kl_nats:.3g} nats at {found.factor:.3g} times"
        less = "Ask for less, or" if found.kl_nats < target else "The KL jumps there: ask for what it jumps to, or"
        way_out = f"{less} take another entry: see docs/mismatch.md."
        raise OptionError("mismatch.target_kl", target, f"{legal} their strength", way_out)
    parts.ranks.check_same("the factor on the mismatch", found.factor)
    inference.scale(found.factor)
    return found


def solve(measure: Callable[[float], float], target: float, largest: float) -> Found:
    """Factor in (0, `largest`] at which `measure`, increasing and 0 at 0, comes closest to `target`.

    KL grows with the square of a small perturbation, so the next factor is f · √(target / KL); a guess outside of the
    bracket found so far gives way to its geometric middle.
    """
    low, high, factor = 0.0, math.inf, min(1.0, largest)
    best = Found(factor, math.nan)
    for _ in range(ROUNDS):
        value = measure(factor)
        if math.isnan(best.kl_nats) or abs(value - target) < abs(best.kl_nats - target):
            best = Found(factor, value)
        if abs(value / target - 1) <= CLOSE or (value < target and factor >= largest):
            break
        low, high = (factor, high) if value < target else (low, factor)
        guess = factor * math.sqrt(target / value) if value > 0 and math.isfinite(value) else factor * 8
        factor = min(guess if low < guess < high else _between(low, high), largest)
        if high < math.inf and (high - low <= STEP * high or high * LARGEST < 1):
            break
    return best


def _between(low: float, high: float) -> float:
    """A factor inside a bracket one of whose ends may be 0 or infinite."""
    if low == 0:
        return high / 8
    return low * 8 if math.isinf(high) else math.sqrt(low * high)


@torch.no_grad()
def measured_kl(cell: Cell, parts: Parts, inference: Inference, factor: float) -> float:
    """KL a token, nats, at `factor` times the strengths; the same random numbers every time. See `calibrate`."""
    inference.scale(factor)
    engines = inference.load(parts.model)
    words = int(parts.model.config.get_text_config().vocab_size)
    entries = cell.task.num_prompts * cell.task.num_generations * cell.task.max_completion_length * words
    prompts = ROUTED_PROMPTS if any(entry.needs_experts for entry in cell.mismatch) else PROMPTS
    # Whole batches, as in training: some kernels depend on how many rows there are.
    batches = max(1, min(prompts // cell.task.num_prompts, ENTRIES // entries))
    pieces = [_kl_N(cell, parts, inference, engines, batch) for batch in range(1, batches + 1)]
    return float(torch.cat(pieces).mean())


def _kl_N(cell: Cell, parts: Parts, inference: Inference, engines: Engines, batch: int) -> Tensor:
    """KL, or its estimate from what is written down, of every token of one batch."""
    task = cell.task
    prompts = parts.sampler.pad(task.encode(task.train_rows(cell.seed, batch), parts.tokenizer), parts.device)
    place, drawn = Place(cell.seed, PURPOSE, batch), list[Tensor]()

    def keep(logp_BV: Tensor) -> None:
        if not drawn or (len(drawn) + 1) * logp_BV.numel() <= ENTRIES:
            drawn.append(logp_BV)

    samples = parts.sampler.sample(
        engines,
        prompts,
        num_generations=task.num_generations,
        **place._asdict(),
        inference=inference,
        watch=keep,
    )
    if any(entry.changes_draws for entry in cell.mismatch):
        first = prompts.tokens_PL.shape[1]
        last = first + len(drawn)
        mask_BC = samples.mask_BT[:, first:last]
        tokens_BT, position_BT = samples.tokens_BT[:, :last], samples.position_BT[:, :last]
        logits = completion_logits(parts.model, tokens_BT, position_BT, first=first)
        trainer_NV = torch.log_softmax(logits / task.temperature, -1)[mask_BC]
        return kl_full(torch.stack(drawn, 1)[mask_BC], trainer_NV)
    samples = inference.handed_over(samples, place, parts.sampler)
    inputs = (samples.tokens_BT, samples.position_BT, samples.mask_BT)
    scored = token_logps(parts.model, *inputs, temperature=task.temperature)
    return token_statistic((scored.logp_BT - samples.logp_behav_BT)[samples.mask_BT].double(), "k3")
