"""DRO: policy gradient with a squared log-ratio as the only trust region (arXiv 2405.19107)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.loss._families import PenalisedLogp

if TYPE_CHECKING:
    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class DRO(PenalisedLogp):
    """(1/Σ|y|) Σ_bt −A log θ + (β/2) (log r)².

    Direct reward optimisation as the frameworks have it: the group's advantage takes the place of the paper's learned
    value, and every token is regressed by itself. On-policy the penalty's gradient is 0; off-policy it pulls each token
    back to the anchor, with advantage or without.
    """

    dro_beta: float

    reduction = "token_mean"

    def check(self) -> None:
        """The penalty pulls towards the anchor."""
        super().check()
        self.require(self.dro_beta >= 0, "dro_beta", "a number of at least 0")

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See `stalefront.loss._families`."""
        return self.penalised(inputs, self.dro_beta / 2)
