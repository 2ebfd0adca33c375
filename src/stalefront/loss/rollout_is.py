"""Direct double-sided importance sampling: outside a band of θ/μ a token leaves the loss (GLM-5, SAO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalefront.loss._families import MaskedRatioLoss

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class RolloutIS(MaskedRatioLoss):
    """(1/Σ|y|) Σ_bt −sg[r 1{1 − ε₋ < r < 1 + ε₊}] A log θ, with r = θ/μ by default.

    No policy but the sampler's enters. Widths of .2 are SkyRL's; SAO has .3/5 for mathematics and .8/3 for code.

    Attributes
    ----------
    bounds
        Whether a ratio on a bound is kept (`inclusive`) or not (`strict`).
    """

    epsilon_low: float
    epsilon_high: float
    bounds: Literal["strict", "inclusive"]

    def check(self) -> None:
        """The band holds 1."""
        super().check()
        for field in ("epsilon_low", "epsilon_high"):
            self.require(getattr(self, field) > 0, field, "a number above 0")

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See the class."""
        return self.weighted(inputs)

    def outside(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Below and above the band."""
        import torch

        ratio = torch.exp(self.log_ratio_BT(inputs).detach())
        low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
        if self.bounds == "strict":
            return ratio <= low, ratio >= high
        return ratio < low, ratio > high
