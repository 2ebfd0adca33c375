"""CISPO: a capped, detached ratio weights the log-prob, so that no token's gradient is cut (arXiv 2506.13585)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.loss._families import ClampedWeight

if TYPE_CHECKING:
    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class CISPO(ClampedWeight):
    """(1/Σ|y|) Σ_bt −sg[clamp(r, floor, epsilon_high)] A log θ.

    `epsilon_high` is the largest weight itself, as in TRL, whose default of .2 scales every on-policy weight down to
    .2; the canonical range is [0, 5].

    Attributes
    ----------
    floor : float
        Smallest weight; 0 for none.
    ppo_mask : bool
        Also drop the tokens that PPO's clip at the two bounds would stop: r > epsilon_high with A > 0, r < floor with
        A < 0 (the paper's unified form, eq. 7).
    """

    epsilon_high: float
    floor: float
    ppo_mask: bool

    reduction = "token_mean"

    def check(self) -> None:
        """The cap is a positive weight, the floor one below it."""
        super().check()
        way_out = "It is the largest weight, not a width around 1: 5 is canonical."
        self.require(self.epsilon_high > 0, "epsilon_high", "a number above 0, or inf", way_out)
        self.require(0 <= self.floor <= self.epsilon_high, "floor", "a number from 0 to epsilon_high")

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest weight."""
        return self.floor, self.epsilon_high

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See `stalefront.surrogate.clamped_weight`."""
        token, low, high = value = super().surrogate(inputs)
        if not self.ppo_mask:
            return value
        advantage = inputs.advantage_B1
        stopped = (high & (advantage > 0)) | (low & (advantage < 0))
        return value._replace(token_loss_BT=token.where(~stopped, 0.0))
