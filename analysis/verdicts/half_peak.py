"""``half_peak``: the reward falls below a share of its own running maximum (a failure that need not be absorbing)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stalefront.analysis.verdicts.base import (
    Curve,
    Verdict,
    before,
    check_min_samples,
    check_range,
    non_finite,
    pool,
    too_few,
)


@dataclass(frozen=True)
class HalfPeak:
    """Pooled reward below ``fraction`` of the highest pooled reward so far, for ``n_windows`` windows in a row.

    Rewards are pooled over windows of at least ``min_samples`` completions, so that the running maximum is not the
    luckiest single point. Within the first such window, the event lies in (last point before, first point that is
    itself below the share].

    Parameters
    ----------
    fraction : float
        Share of the running maximum. Cited: one half, arXiv 2607.01083 discussion of non-absorbing failure.
    n_windows : int
        Consecutive windows (each starts one validation point later). Assumed: 3.
    min_samples : int
        Completions a window must hold. Assumed: as for zero, 300.
    """

    fraction: float = 0.5
    n_windows: int = 3
    min_samples: int = 300

    name = "half_peak"

    def __post_init__(self) -> None:
        """Refuse thresholds that make no sense."""
        check_range("HalfPeak", "fraction", self.fraction, 0.0, 1.0, "it is a share of the running maximum")
        check_min_samples("HalfPeak", self.min_samples)
        if self.n_windows < 1:
            raise ValueError(f"HalfPeak.n_windows={self.n_windows!r}: must be at least 1; 1 asks for a single window")

    @property
    def sentence(self) -> str:
        """What the definition says, in plain English."""
        return (
            f"The reward, pooled over at least {self.min_samples} samples, is below {self.fraction:.0%} of its running "
            f"maximum for {self.n_windows} windows in a row."
        )

    def __call__(self, curve: Curve) -> Verdict:
        """Judge one run."""
        threshold = asdict(self)
        pooled = pool(curve, self.min_samples)
        peak = np.fmax.accumulate(pooled.reward) if len(pooled) else pooled.reward
        # A NaN reward is not a high one: the run has nothing left to show.
        low = (pooled.reward < self.fraction * peak) | np.isnan(pooled.reward)
        index = _first_run(low & (peak > 0), self.n_windows)
        if index is not None:
            window = slice(int(pooled.first[index]), int(pooled.last[index]) + 1)
            point = window.start + int(np.argmin(curve.reward[window] >= self.fraction * peak[index]))
            evidence = {
                "cause": "below a share of the peak",
                "reward": float(pooled.reward[index]),
                "peak": float(peak[index]),
            }
            return Verdict(self.name, True, before(curve, point), int(curve.steps[point]), evidence, threshold)
        if curve.end == "non-finite":
            return non_finite(curve, self.name, threshold)
        reason = too_few(curve, self.min_samples)
        if reason is None and not np.any(peak > 0):
            reason = "undecidable: the pooled reward is never above zero, so no share of its maximum can be lost"
        if reason is not None:
            return Verdict(self.name, None, None, None, {"reason": reason}, threshold)
        evidence = {"cause": "stayed above", "peak": float(np.nanmax(peak)), "reward_last": float(pooled.reward[-1])}
        return Verdict(self.name, False, None, None, evidence, threshold)


def _first_run(flags: np.ndarray[Any, np.dtype[np.bool_]], length: int) -> int | None:
    """Index at which the first run of ``length`` True values starts, or None."""
    if len(flags) < length:
        return None
    hits = np.flatnonzero(np.convolve(flags.astype(np.int64), np.ones(length, dtype=np.int64), "valid") == length)
    return int(hits[0]) if len(hits) else None
