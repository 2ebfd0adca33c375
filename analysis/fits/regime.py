"""Ballistic or diffusive: does a run drift steadily from its start, or wander?

Notation (one run, R rows of its step record):

==============  =========================================================================================
``dist``        ‖θ_t − θ₀‖, shape (R,)
``lr_sum``      Σ of the applied learning rate up to t, shape (R,)
``cos_grad``    cosine of the applied gradients of t and t − 1, shape (R,)
``at_refresh``  whether t is the first learner step on a new rollout batch, shape (R,)
==============  =========================================================================================

A constant push moves a run ‖θ − θ₀‖ ∝ Σ lr (exponent 1, cosine near 1); independent pushes move it ∝ √t, that is
(Σ lr)^½ at a constant rate (exponent ½, cosine near 0). The paper's t·η law is conditional on the first
(arXiv 2607.01083 §4). The cosine is taken at refreshes only: within a reuse cycle two gradients come from the same
batch and agree for that reason alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stalefront.analysis.verdicts.base import BoolArray, FloatArray

REGIMES = ("ballistic", "diffusive", "mixed", "undecidable")


@dataclass(frozen=True)
class RegimeCall:
    """Regime of one run with the numbers behind it; NaN where not measurable, with the count beside it."""

    regime: str
    cos_refresh: float
    n_refresh: int
    cos_within: float
    n_within: int
    n_non_finite: int
    exponent: float
    n_exponent: int
    reason: str


@dataclass(frozen=True)
class Regime:
    """Call a run ballistic or diffusive when cosine *and* growth exponent say so, ``mixed`` otherwise.

    Parameters
    ----------
    cos_ballistic, cos_diffusive : float
        Mean at-refresh cosine at or above / at or below. Assumed: .5 and .2.
    exponent_ballistic, exponent_diffusive : float
        Slope of log ‖θ − θ₀‖ on log Σ lr at or above / at or below. Assumed: .85 and .65, around 1 and ½.
    min_refresh : int
        Refreshes needed. Assumed: 3.
    min_rows : int
        Rows needed for the exponent. Assumed: 8.
    skip_fraction : float
        Rows with Σ lr below this share of its final value are left out: they are the learning-rate warm-up, where
        even a random walk grows faster than (Σ lr)^½. Assumed: .1.
    """

    cos_ballistic: float = 0.5
    cos_diffusive: float = 0.2
    exponent_ballistic: float = 0.85
    exponent_diffusive: float = 0.65
    min_refresh: int = 3
    min_rows: int = 8
    skip_fraction: float = 0.1

    def __post_init__(self) -> None:
        """Refuse thresholds that overlap."""
        for low, high in (("cos_diffusive", "cos_ballistic"), ("exponent_diffusive", "exponent_ballistic")):
            if not getattr(self, low) < getattr(self, high):
                raise ValueError(
                    f"Regime.{low}={getattr(self, low)!r} must be below {high}={getattr(self, high)!r}; "
                    "a run between the two is called mixed"
                )
        if not 0 <= self.skip_fraction < 1:
            raise ValueError(f"Regime.skip_fraction={self.skip_fraction!r}: must lie in [0, 1); 0 keeps every row")

    def __call__(
        self, *, dist: FloatArray, lr_sum: FloatArray, cos_grad: FloatArray, at_refresh: BoolArray
    ) -> RegimeCall:
        """Call the regime of one run from the rows before its collapse (or all of them).

        Parameters
        ----------
        dist, lr_sum, cos_grad : float arrays, shape (R,)
            NaN where not measured.
        at_refresh : bool array, shape (R,)
        """
        known = np.isfinite(cos_grad)
        refresh, within = cos_grad[known & at_refresh], cos_grad[known & ~at_refresh]
        exponent, n_exponent = self.growth_exponent(dist, lr_sum)
        cos_refresh = _mean(refresh)
        numbers: dict[str, Any] = {
            "cos_refresh": cos_refresh,
            "n_refresh": len(refresh),
            "cos_within": _mean(within),
            "n_within": len(within),
            "n_non_finite": int(np.isinf(cos_grad).sum()),
            "exponent": exponent,
            "n_exponent": n_exponent,
        }
        if len(refresh) < self.min_refresh:
            return RegimeCall("undecidable", **numbers, reason=f"{len(refresh)} refreshes of {self.min_refresh} needed")
        if np.isnan(exponent):
            return RegimeCall("undecidable", **numbers, reason=f"{n_exponent} usable rows of {self.min_rows} needed")
        if cos_refresh >= self.cos_ballistic and exponent >= self.exponent_ballistic:
            return RegimeCall("ballistic", **numbers, reason="cosine and exponent agree")
        if cos_refresh <= self.cos_diffusive and exponent <= self.exponent_diffusive:
            return RegimeCall("diffusive", **numbers, reason="cosine and exponent agree")
        return RegimeCall("mixed", **numbers, reason="cosine and exponent disagree or lie between the thresholds")

    def growth_exponent(self, dist: FloatArray, lr_sum: FloatArray) -> tuple[float, int]:
        """Least-squares slope of log dist on log lr_sum after the warm-up, and the rows used; NaN if too few."""
        total = np.nanmax(lr_sum) if np.isfinite(lr_sum).any() else np.nan
        use = np.isfinite(dist) & np.isfinite(lr_sum) & (dist > 0) & (lr_sum > 0)
        use &= lr_sum >= self.skip_fraction * total
        n = int(use.sum())
        if n < self.min_rows or np.ptp(lr_sum[use]) == 0:
            return float("nan"), n
        x, y = np.log(lr_sum[use]), np.log(dist[use])
        x = x - x.mean()
        return float(x @ y / (x @ x)), n

    def thresholds(self) -> dict[str, Any]:
        """Every threshold, by name."""
        return asdict(self)


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else float("nan")
