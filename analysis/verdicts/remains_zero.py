"""``remains_zero`` (default): the pass rate falls to zero and stays there to the end of the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from stalefront.analysis.verdicts.base import Curve, Verdict, before, non_finite, too_few
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
    """Every full window from the event to the end of the run is zero, and there is at least one.

    Event in (last point before the first of them, its first point]. The end of the run is the horizon: a run that
    would recover later is not seen to (the definition is itself censored at T). A run that stopped early without
    being finished while at zero is undecidable, since it may have recovered.

    Thresholds: see ``ZeroDefinition``.
    """

    name = "remains_zero"

    @property
    def sentence(self) -> str:
        """What the definition says, in plain English."""
        return (
            f"The held-out pass rate falls to zero and stays there to the end of the run: in every window from then on "
            f"(at least {self.min_samples} samples each) its one-sided {self.level:.0%} upper bound is at most "
            f"{self.max_rate:g}."
        )

    def __call__(self, curve: Curve) -> Verdict:
        """Judge one run; a run that went non-finite counts as collapsed for good."""
        threshold = asdict(self)
        windows = zero_windows(curve, **threshold)
        index = _last_fall(windows)
        if index is not None:
            return self._at_zero(curve, windows, index)
        if curve.end == "non-finite":
            return non_finite(curve, self.name, threshold)
        reason = too_few(curve, self.min_samples)
        if reason is None and bool(windows.zero.all()):
            reason = STARTS_AT_ZERO
        if reason is not None:
            return Verdict(self.name, None, None, None, {"reason": reason}, threshold)
        evidence = {
            "cause": "last window not zero",
            **window_evidence(curve, windows, len(windows.zero) - 1),
            **dips(curve, windows),
        }
        return Verdict(self.name, False, None, None, evidence, threshold)

    def _at_zero(self, curve: Curve, windows: ZeroWindows, index: int) -> Verdict:
        """Verdict on a run whose last windows are zero."""
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


def _last_fall(windows: ZeroWindows) -> int | None:
    """Index of the first of the zero windows that reach the end, if the run was above zero before them."""
    if first_fall(windows) is None or not windows.zero[-1]:
        return None
    return int(np.flatnonzero(~windows.zero)[-1]) + 1
