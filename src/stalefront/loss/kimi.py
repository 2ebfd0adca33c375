"""Kimi k1.5: policy gradient on stale samples, held by a squared log-ratio (arXiv 2501.12599, eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.loss._families import PenalisedLogp

if TYPE_CHECKING:
    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class Kimi(PenalisedLogp):
    """(1/B) Σ_b (1/|y_b|) Σ_t −A log θ + (τ/2) (log r)².

    The paper squares the log-ratio of a whole answer; here it is squared token by token, as ROLL has it.
    """

    tau: float

    reduction = "sequence_mean"

    def check(self) -> None:
        """The penalty pulls towards the anchor."""
        super().check()
        self.require(self.tau >= 0, "tau", "a number of at least 0")

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See `stalefront.loss._families`."""
        return self.penalised(inputs, self.tau / 2)
