"""Where a run is at zero: the rule that ``first_zero`` and ``remains_zero`` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stalefront.analysis.verdicts.base import (
    BoolArray,
    Curve,
    FloatArray,
    Pooled,
    check_min_samples,
    check_range,
    clopper_pearson_lower,
    clopper_pearson_upper,
    pool,
)


@dataclass(frozen=True)
class ZeroWindows:
    """The full windows of a curve, which of them are shown to be zero, and which to be above; arrays of shape (W,).

    A window that is neither cannot be told from zero with the samples it holds.
    """

    pooled: Pooled
    upper: FloatArray
    zero: BoolArray
    above: BoolArray

    def at_zero(self, n_points: int) -> BoolArray:
        """Which of the curve's points lie in at least one zero window, shape (V,)."""
        covered = np.zeros(n_points, dtype=np.bool_)
        for first, last in zip(self.pooled.first[self.zero], self.pooled.last[self.zero], strict=True):
            covered[first : last + 1] = True
        return covered


@dataclass(frozen=True)
class ZeroDefinition:
    """What counts as zero, for the definitions that are about reaching it.

    Parameters
    ----------
    max_rate : float
        Highest pass rate called zero. Assumed: 1 %.
    level : float
        One-sided Clopper–Pearson confidence. Assumed: 95 %.
    min_samples : int
        Completions a window must hold. 299 without a pass show a rate below 1 % at 95 % (the "3/n" rule).
    """

    max_rate: float = 0.01
    level: float = 0.95
    min_samples: int = 300

    def __post_init__(self) -> None:
        """Refuse thresholds that make no sense."""
        check_zero_fields(type(self).__name__, self.max_rate, self.level, self.min_samples)


def zero_windows(curve: Curve, *, max_rate: float, level: float, min_samples: int) -> ZeroWindows:
    """Mark the windows whose pass rate is shown to be at most ``max_rate``, and those shown to be higher.

    zero ⇔ upper(passes, samples; level) ≤ max_rate, above ⇔ lower(passes, samples; level) > max_rate, pooled over
    the window. An all-zero point alone is no evidence of zero: with n samples it happens with probability (1 − p)ⁿ
    at pass rate p. Nor is a single pass evidence of a recovery.
    """
    pooled = pool(curve, min_samples)
    upper = clopper_pearson_upper(pooled.passes, pooled.samples, level)
    lower = clopper_pearson_lower(pooled.passes, pooled.samples, level)
    return ZeroWindows(pooled, upper, upper <= max_rate, lower > max_rate)


def check_zero_fields(owner: str, max_rate: float, level: float, min_samples: int) -> None:
    """Raise if a zero rule's thresholds make no sense or no number of samples in a window could meet them."""
    check_range(owner, "max_rate", max_rate, 0.0, 1.0, "it is a pass rate, e.g. 0.01")
    check_range(owner, "level", level, 0.5, 1.0, "it is a one-sided confidence level, e.g. 0.95")
    check_min_samples(owner, min_samples)
    needed = int(np.ceil(np.log(1 - level) / np.log(1 - max_rate)))
    if min_samples < needed:
        raise ValueError(
            f"{owner}.min_samples={min_samples!r}: {needed} samples without a pass are needed to show a rate of at "
            f"most {max_rate} at level {level}; raise min_samples or max_rate"
        )


def dips(curve: Curve, windows: ZeroWindows) -> dict[str, Any]:
    """Count the visits to zero: how many, the longest, the last.

    Returns
    -------
    dict
        ``n_dips``; ``dwell_steps``, learner steps from the first to the last point of the longest visit;
        ``t_last_zero``, learner step of the last point at zero, or None; ``recovered``, whether zero was touched
        and the last full window is shown to be above it.
    """
    covered = windows.at_zero(len(curve.steps))
    edges = np.diff(np.concatenate([[0], covered.astype(np.int8), [0]]))
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    lengths = curve.steps[stops] - curve.steps[starts]
    return {
        "n_dips": len(starts),
        "dwell_steps": int(lengths.max()) if len(starts) else 0,
        "t_last_zero": int(curve.steps[stops[-1]]) if len(starts) else None,
        "recovered": bool(len(starts) and windows.above[-1]),
    }


def window_evidence(curve: Curve, windows: ZeroWindows, index: int) -> dict[str, Any]:
    """What one window shows, in the words of the record."""
    pooled = windows.pooled
    return {
        "window_steps": [int(curve.steps[pooled.first[index]]), int(curve.steps[pooled.last[index]])],
        "n": int(pooled.samples[index]),
        "passes": int(pooled.passes[index]),
        "upper": float(windows.upper[index]),
    }


STARTS_AT_ZERO = "undecidable: the pass rate is at zero from the first window on, so it cannot fall to it"
