"""``below_start``: the run ends with a lower reward than it started with."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from scipy import stats

from stalefront.analysis.verdicts.base import (
    Curve,
    Pooled,
    Verdict,
    before,
    check_min_samples,
    check_range,
    non_finite,
    pool,
    too_few,
)


@dataclass(frozen=True)
class BelowStart:
    """The last full window's mean reward is below the reward of the first point (before any update).

    Event in (last point before, first point itself below the start], within the first of the windows that are all
    below the start to the end of the run.

    Parameters
    ----------
    alpha : float
        Largest p-value of the one-sided two-proportion z test (pooled variance) of final against initial passes.
        The default .5 asks nothing beyond "final below initial", the plain comparison the test-bed was measured
        with (assumed); .05 would ask for a significant loss. The p-value is recorded either way.
    min_samples : int
        Completions in the final window. Assumed: 300.
    """

    alpha: float = 0.5
    min_samples: int = 300

    name = "below_start"

    def __post_init__(self) -> None:
        """Refuse thresholds that make no sense."""
        check_min_samples("BelowStart", self.min_samples)
        check_range("BelowStart", "alpha", self.alpha, 0.0, 0.5 + 1e-12, "0.5 is the plain comparison, 0.05 a test")

    @property
    def sentence(self) -> str:
        """What the definition says, in plain English."""
        test = "" if self.alpha >= 0.5 else f" and the one-sided two-proportion test gives p ≤ {self.alpha:g}"
        return (
            f"The mean reward of the last window (at least {self.min_samples} samples) is below the reward before the "
            f"first update{test}."
        )

    def __call__(self, curve: Curve) -> Verdict:
        """Judge one run; undecidable while a run that is below its start may still go on."""
        threshold = asdict(self)
        if curve.end == "non-finite":
            return non_finite(curve, self.name, threshold)
        reason = too_few(curve, self.min_samples)
        if reason is None and curve.samples[0] == 0:
            reason = "undecidable: no reward was measured before the first update"
        if reason is not None:
            return Verdict(self.name, None, None, None, {"reason": reason}, threshold)
        pooled = pool(curve, self.min_samples)
        start, last = float(curve.reward[0]), float(pooled.reward[-1])
        p_value = two_proportion_p(
            int(pooled.passes[-1]), int(pooled.samples[-1]), int(curve.passes[0]), int(curve.samples[0])
        )
        evidence = {"reward_start": start, "reward_last": last, "p_value": p_value, "n": int(pooled.samples[-1])}
        below = not last >= start and (self.alpha >= 0.5 or p_value <= self.alpha)
        if not below:
            return Verdict(self.name, False, None, None, {"cause": "not below the start", **evidence}, threshold)
        if not curve.final:
            reason = f"undecidable: below the start when last seen at step {curve.end_step} of {curve.horizon}"
            return Verdict(self.name, None, None, None, {"reason": reason, **evidence}, threshold)
        index = _since(curve, pooled, start)
        step_lo, step_hi = before(curve, index), int(curve.steps[index])
        return Verdict(self.name, True, step_lo, step_hi, {"cause": "below the start", **evidence}, threshold)


def _since(curve: Curve, pooled: Pooled, start: float) -> int:
    """First point below ``start`` in the first of the windows that stay below it to the end."""
    above = np.flatnonzero(pooled.reward >= start)
    window = int(above[-1]) + 1 if len(above) else 0
    first, last = int(pooled.first[window]), int(pooled.last[window])
    return first + int(np.argmin(curve.reward[first : last + 1] >= start))


def two_proportion_p(passes: int, samples: int, passes_start: int, samples_start: int) -> float:
    """One-sided p-value that the later pass rate is lower.

    z = (p₁ − p₀)/√(p̄(1 − p̄)(1/n₁ + 1/n₀)), p̄ pooled; p = Φ(z). 0.5 where neither sample varies.
    """
    rate, rate_start = passes / samples, passes_start / samples_start
    pooled = (passes + passes_start) / (samples + samples_start)
    variance = pooled * (1 - pooled) * (1 / samples + 1 / samples_start)
    return 0.5 if variance == 0 else float(stats.norm.cdf((rate - rate_start) / np.sqrt(variance)))
