"""CISPO: a capped, detached ratio weights the log-prob, so that no token's gradient is cut (arXiv 2506.13585)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.loss import Loss

if TYPE_CHECKING:
    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class CISPO(Loss):
    """(1/Σ|y|) Σ_bt −sg[min(r, epsilon_high)] A log θ.

    `epsilon_high` is the largest weight itself, as in TRL, whose default of .2 scales every on-policy weight down to
    .2; the canonical range is [0, 5].
    """

    epsilon_high: float

    reduction = "token_mean"

    def check(self) -> None:
        """The cap is a positive weight."""
        super().check()
        way_out = "It is the largest weight, not a width around 1: 5 is canonical."
        self.require(self.epsilon_high > 0, "epsilon_high", "a number above 0, or inf", way_out)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See `stalefront.surrogate.weighted_logp`."""
        from stalefront.surrogate import weighted_logp

        return weighted_logp(
            inputs.logp_theta_BT, inputs.log_ratio_BT, inputs.advantage_B[:, None], cap=self.epsilon_high
        )
