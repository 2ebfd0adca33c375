"""IPO: tokens whose probability moved too far, in either direction, leave the loss (INTELLECT policy optimisation)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.loss._families import MaskedRatioLoss

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs


@dataclass(frozen=True)
class IPO(MaskedRatioLoss):
    """(1/Σ|y|) Σ_bt −A r 1{|p_θ − p_b| ≤ ε} + kl_tau (log r)², b = the anchor's lower policy.

    The mask looks at probabilities, not at ratios, and not at the sign of A. `kl_tau` acts on masked tokens too.
    Source: prime-rl, where ε was .1 with kl_tau = 1e-3 until September 2026, then .3 without the penalty.

    Attributes
    ----------
    value_cap : float or None
        Upper cap on the ratio's value that leaves its gradient.
    """

    epsilon: float
    kl_tau: float
    value_cap: float | None

    def check(self) -> None:
        """A cap below 1 would act on-policy."""
        super().check()
        self.require(self.epsilon >= 0, "epsilon", "a probability of at least 0")
        self.require(self.kl_tau >= 0, "kl_tau", "a number of at least 0")
        self.require(self.value_cap is None or self.value_cap >= 1, "value_cap", "a number of at least 1, or null")

    @property
    def penalty(self) -> float:
        """Weight of (log r)²."""
        return self.kl_tau

    @property
    def ratio_cap(self) -> float | None:
        """See `value_cap`."""
        return self.value_cap

    def outside(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Moved down, and up, by more than ε."""
        from stalefront.trust_region import probability_shift

        shift = probability_shift(inputs.logp_theta_BT.detach(), self.base_BT(inputs))
        return shift < -self.epsilon, shift > self.epsilon
