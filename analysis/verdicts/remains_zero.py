"""``remains_zero`` (default): the pass rate falls to zero and stays there to the end of the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from stalefront.analysis.verdicts.base import Curve, Verdict, before, clopper_pearson_upper, non_finite, too_few
from stalefront.analysis.verdicts.first_zero import first_fall
from stalefront.analysis.verdicts.zero import (
    STARTS_AT_ZERO,
    ZeroDefinition,
    ZeroWindows,
    dips,
    window_evidence,
    zero_windows,
)


@dataclass(frozen=True)
class RemainsZero(ZeroDefinition):
    """From the event to the end of the run the pass rate is zero, and no window says otherwise.

    The event is the first zero window after which no window is shown to be above zero, and from whose first point to
    the end of the run all samples pooled show a rate of at most ``max_rate``. A stray pass in thousands of samples
    therefore neither moves the event nor counts as a recovery: leaving zero takes as much evidence as reaching it.
    Event in (last point before that window, its first point].

    A run that touched zero has recovered (event False) when its last window is shown to be above zero; when its end
    can be told neither from zero nor from above it, the verdict is None. The end of the run is the horizon: a run
    that would recover later is not seen to (the definition is itself censored at T). A run that stopped early
    without being finished while at zero is undecidable, since it may have recovered.

    Thresholds: see ``ZeroDefinition``.
    """

    name = "remains_zero"

    @property
    def sentence(self) -> str:
        """What the definition says, in plain English."""
        return (
            f"The held-out pass rate falls to zero and stays there to the end of the run: all samples from then on "
            f"show, by a one-sided {self.level:.0%} bound, a rate of at most {self.max_rate:g}, and no window of at "
            f"least {self.min_samples} samples shows a higher one."
        )

    def __call__(self, curve: Curve) -> Verdict:
        """Judge one run; a run that went non-finite counts as collapsed for good."""
        threshold = asdict(self)
        windows = zero_windows(curve, **threshold)
        index = last_fall(curve, windows, max_rate=self.max_rate, level=self.level)
        if index is not None:
            return self._at_zero(curve, windows, index)
        if curve.end == "non-finite":
            return non_finite(curve, self.name, threshold)
        reason = too_few(curve, self.min_samples)
        if reason is None and bool(windows.zero.all()):
            reason = STARTS_AT_ZERO
        if reason is not None:
            return Verdict(self.name, None, None, None, {"reason": reason}, threshold)
        evidence = {**window_evidence(curve, windows, len(windows.zero) - 1), **dips(curve, windows)}
        if first_fall(windows) is not None and not windows.above[-1]:
            reason = f"undecidable: touched zero, and {evidence['passes']} passes in the last {evidence['n']} samples"
            return Verdict(self.name, None, None, None, {"reason": reason, **evidence}, threshold)
        evidence = {"cause": "last window not zero", **evidence}
        return Verdict(self.name, False, None, None, evidence, threshold)

    def _at_zero(self, curve: Curve, windows: ZeroWindows, index: int) -> Verdict:
        """Verdict on a run that ends at zero."""
        evidence = {
            "cause": "zero pass rate",
            **window_evidence(curve, windows, index),
            **dips(curve, windows),
            "n_windows": len(windows.zero) - index,
        }
        if not curve.final:
            reason = f"undecidable: at zero when last seen at step {curve.end_step} of {curve.horizon} ({curve.end})"
            return Verdict(self.name, None, None, None, {"reason": reason, **evidence}, asdict(self))
        start = int(windows.pooled.first[index])
        return Verdict(self.name, True, before(curve, start), int(curve.steps[start]), evidence, asdict(self))


def last_fall(curve: Curve, windows: ZeroWindows, *, max_rate: float, level: float) -> int | None:
    """Index of the window where the stretch at zero that reaches the end begins, if the run was above zero before.

    Zero windows i with no window above zero from i on, and upper(passes, samples from the first point of i to the
    end; level) ≤ max_rate: the first of them.
    """
    fall = first_fall(windows)
    if fall is None:
        return None
    above = np.flatnonzero(windows.above)
    start = max(fall, int(above[-1]) + 1 if len(above) else 0)
    first = windows.pooled.first
    passes = curve.passes[::-1].cumsum()[::-1][first]
    samples = curve.samples[::-1].cumsum()[::-1][first]
    at_zero = windows.zero & (clopper_pearson_upper(passes, samples, level) <= max_rate)
    later = np.flatnonzero(at_zero[start:])
    return int(start + later[0]) if len(later) else None
