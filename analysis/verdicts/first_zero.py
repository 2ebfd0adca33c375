"""``first_zero``: the pass rate falls to zero at least once (arXiv 2607.01083 §4.3, made statistical)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from stalefront.analysis.verdicts.base import Curve, Verdict, before, non_finite, too_few
from stalefront.analysis.verdicts.zero import (
    STARTS_AT_ZERO,
    ZeroDefinition,
    ZeroWindows,
    dips,
    window_evidence,
    zero_windows,
)


@dataclass(frozen=True)
class FirstZero(ZeroDefinition):
    """The first window that is zero, after one that is not.

    Event in (last point before that window, first point of that window]. A run that is at zero from its start
    cannot fall to it and is undecidable until it has risen.

    Thresholds: see ``ZeroDefinition``.
    """

    name = "first_zero"

    @property
    def sentence(self) -> str:
        """What the definition says, in plain English."""
        return (
            f"The held-out pass rate falls to zero at least once: its one-sided {self.level:.0%} upper bound is at "
            f"most {self.max_rate:g} over a window of at least {self.min_samples} samples."
        )

    def __call__(self, curve: Curve) -> Verdict:
        """Judge one run; a run that went non-finite before any zero window collapses there."""
        threshold = asdict(self)
        windows = zero_windows(curve, **threshold)
        index = first_fall(windows)
        if index is not None:
            evidence = {"cause": "zero pass rate", **window_evidence(curve, windows, index), **dips(curve, windows)}
            start = int(windows.pooled.first[index])
            return Verdict(self.name, True, before(curve, start), int(curve.steps[start]), evidence, threshold)
        if curve.end == "non-finite":
            return non_finite(curve, self.name, threshold)
        reason = too_few(curve, self.min_samples)
        if reason is None and bool(windows.zero.all()):
            reason = STARTS_AT_ZERO
        if reason is not None:
            return Verdict(self.name, None, None, None, {"reason": reason}, threshold)
        lowest = int(np.argmin(windows.upper))
        evidence = {"cause": "no zero window", **window_evidence(curve, windows, lowest), **dips(curve, windows)}
        return Verdict(self.name, False, None, None, evidence, threshold)


def first_fall(windows: ZeroWindows) -> int | None:
    """Index of the first zero window that follows a window above zero, or None."""
    above = np.flatnonzero(~windows.zero)
    if not len(above):
        return None
    later = np.flatnonzero(windows.zero[above[0] :])
    return int(above[0] + later[0]) if len(later) else None
