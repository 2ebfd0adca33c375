"""`old` is an exponentially weighted average of the trainer's own weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.proximal import Proximal

if TYPE_CHECKING:
    from stalefront.batch import LossInputs


@dataclass(frozen=True)
class EMA(Proximal):
    """log old of averaged parameters θ̄ ← decay · θ̄ + (1 − decay) · θ after every applied update, from θ̄ = π₀.

    PPO-EWMA (Hilton et al. 2021, arXiv 2110.00641, without its correction for a short history: the average starts at
    π₀ and not at nothing); for asynchronous training it stands in for old log-probs that nobody kept (arXiv
    2605.12070, whose decay is not published). The average is kept in float32 and scored at every learner step, one
    more forward of every micro-batch. θ/old and old/μ in the step record are then ratios to the average.

    Attributes
    ----------
    decay : float
        0 is the present policy itself, at which θ/old is 1; towards 1 the average stays at π₀.
    """

    decay: float

    needs_average = True

    def check(self) -> None:
        """A share."""
        self.require(0 <= self.decay < 1, "decay", "a number of at least 0 and below 1", "0.9 spans 10 updates.")

    def __call__(self, inputs: LossInputs) -> LossInputs:
        """Nothing is replaced: the loop has scored `logp_old_BT` with the average."""
        return inputs
