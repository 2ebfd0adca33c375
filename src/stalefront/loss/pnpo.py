"""PNPO: a token's weight is the geometric mean of the ratios up to it, and the token is out when that leaves a band."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.loss._families import MaskedRatioLoss

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class PNPO(MaskedRatioLoss):
    """(1/Σ|y|) Σ_bt −sg[g 1{1 − ε₋ ≤ g ≤ 1 + ε₊}] A log θ, g_t = (Π_{s ≤ t} r_s)^{1/t}.

    Source: arXiv 2608.01418. The text gives the weight and the hard rejection; that the weight carries no gradient, the
    inclusive bounds and the reduction are our reading, and the widths are ours.
    """

    epsilon_low: float
    epsilon_high: float

    def check(self) -> None:
        """The band holds 1."""
        super().check()
        for field in ("epsilon_low", "epsilon_high"):
            self.require(getattr(self, field) >= 0, field, "a number of at least 0")

    def weight_log_BT(self, inputs: LossInputs) -> Tensor:
        """log g."""
        from stalefront.trust_region import prefix_mean

        return prefix_mean(self.log_ratio_BT(inputs), inputs.mask_BT)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See the class."""
        return self.weighted(inputs)

    def outside(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Below and above the band."""
        import torch

        weight = torch.exp(self.weight_log_BT(inputs).detach())
        return weight < 1 - self.epsilon_low, weight > 1 + self.epsilon_high
