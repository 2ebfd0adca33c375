"""Outlier veto: one token with an extreme ratio takes its whole sequence out of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.correction import RatioCorrection

if TYPE_CHECKING:
    from stalefront.batch import LossInputs, Weights


@dataclass(frozen=True)
class OutlierVeto(RatioCorrection):
    """Drop a sequence iff some completion token has ratio < low or ratio > high, or none at all (NaN).

    SkyRL's outlier mask (both sides), and the veto of slime and of older versions of verl (below 1e-4).

    Attributes
    ----------
    low, high : float or None
        Bounds; a ratio on one of them is no outlier. None for none.
    """

    low: float | None
    high: float | None

    level = "sequence"
    looks_at = "ratio"
    bounds = "inclusive"
    kept_weight = "1"

    def check(self) -> None:
        """1 is no outlier."""
        super().check()
        self.require_bounds(self.low, self.high, "ratio")

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """Sequences with an outlier are dropped."""
        from stalefront.ratios import inside

        outlier = ~inside(self.log_ratio_BT(inputs).exp(), self.low, self.high) & inputs.mask_BT
        return so_far.keeping(~outlier.any(-1, keepdim=True))
