"""GAC: less of a gradient that points where the last one pointed, and no step where it points nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stalefront.controller import AS_IT_IS, Controller, Decision, Memory, Step

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.cell import Cell


class Removal(NamedTuple):
    """What becomes of a gradient: `share` of its part along the last one is removed; None where the step is skipped."""

    cosine: float
    action: Literal["apply", "project", "skip"]
    share: float


def removal(cosine: float, *, low: float, high: float) -> Removal:
    """Apply for c < low, remove the share (c − low)/(1 − low) for low ≤ c < high, skip for c ≥ high.

    A cosine that is NaN (a gradient that is zero or not finite) applies.
    """
    if cosine >= high:
        return Removal(cosine, "skip", 1.0)
    if cosine >= low:
        return Removal(cosine, "project", (cosine - low) / (1 - low))
    return Removal(cosine, "apply", 0.0)


def without_parallel(gradient: Tensor, previous: Tensor, share: float) -> Tensor:
    """g − share · ⟨g, ĝ⟩ĝ, ĝ = `previous` / its norm (both flat)."""
    import torch

    from stalefront.update import dot

    return torch.add(gradient, previous, alpha=-share * dot(gradient, previous) / dot(previous, previous))


@dataclass(frozen=True)
class GAC(Controller):
    """Three regimes of the cosine c of the accumulated gradient with the one applied last (GAC, arXiv 2603.01501).

    The paper's thresholds are not published, and neither is the form of its projection: both are ours, and the
    defaults are a choice to be swept. After a skipped step the gradient applied last stays what it was.

    Attributes
    ----------
    low : float
        Below it the gradient is applied as it is.
    high : float
        From it on the step is skipped: it is recorded with `stepped` false, and the version stays. Above 1 for never.
    """

    low: float
    high: float

    needs_gradient = True

    def check(self) -> None:
        """Thresholds in order."""
        self.require(-1 <= self.low < 1, "low", "a number of at least -1 and below 1")
        self.require(self.high >= self.low, "high", f"a number of at least low={self.low}", "Above 1 never skips.")

    def start(self, cell: Cell) -> Memory:
        """No gradient yet."""
        return Compared(self)


class Compared(Memory):
    """What the last decision was; nothing that a later one depends on."""

    def __init__(self, options: GAC) -> None:
        self.options = options
        self.last = Removal(math.nan, "apply", 0.0)

    def decide(self, now: Step) -> Decision:
        """Apply, project or skip."""
        from stalefront.update import cosine

        assert now.gradient is not None, "the rule declares needs_gradient"
        previous = now.previous_gradient
        if previous is None:
            self.last = Removal(math.nan, "apply", 0.0)
            return AS_IT_IS
        self.last = removal(cosine(now.gradient, previous), low=self.options.low, high=self.options.high)
        if self.last.action == "skip":
            return Decision(skip=True)
        if self.last.share == 0:
            return AS_IT_IS
        return Decision(gradient=without_parallel(now.gradient, previous, self.last.share))

    def columns(self) -> dict[str, Any]:
        """The cosine before anything is removed, and the share of the parallel part that was."""
        return {"gac_cos": self.last.cosine, "gac_removed_frac": self.last.share}
