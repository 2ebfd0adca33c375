"""IcePop as a loss: the ratio itself is the objective, on tokens whose ratio lies in a band."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.loss._families import MaskedRatioLoss

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs


@dataclass(frozen=True)
class IcePop(MaskedRatioLoss):
    """(1/Σ|y|) Σ_bt −A r 1{low ≤ r ≤ high}, with gradient through r.

    The band of IcePop (Ring-1T) on θ/μ, as prime-rl has it since September 2026. Elsewhere IcePop is a weight old/μ on
    another loss, which is a correction.
    """

    low: float
    high: float

    def check(self) -> None:
        """The band holds 1."""
        super().check()
        self.require(0 <= self.low <= 1, "low", "a ratio from 0 to 1")
        self.require(self.high >= 1, "high", "a ratio of at least 1, or inf")

    def outside(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Below and above the band, decided on logarithms."""
        from stalefront.surrogate import safe_log

        log_ratio = self.log_ratio_BT(inputs).detach()
        return log_ratio < safe_log(self.low), log_ratio > safe_log(self.high)
