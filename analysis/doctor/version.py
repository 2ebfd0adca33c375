"""Versions that go backwards, and tokens from the future."""

from __future__ import annotations

import numpy as np

from stalefront.analysis.doctor.base import Check, Found
from stalefront.analysis.doctor.records import Records
from stalefront.analysis.narrative import show
from stalefront.analysis.settings import DoctorSettings
from stalefront.analysis.verdicts.base import FloatArray


def look(records: Records, settings: DoctorSettings) -> Found | None:
    """The trainer's version or the version that samples decreases, or a lag is negative."""
    version, step = records.columns["version"], records.columns["step"]
    parts = [_falls(version, step, "the trainer's version falls at step")]
    parts.append(_falls(*_sampling(records), "the version that samples falls at step"))
    lag = np.fmin(records.columns["lag_mean_updates"], records.columns["lag_max_updates"])
    if (negative := lag < 0).any():
        text = f"the lag is negative in {int(negative.sum())} steps, down to {show(float(np.nanmin(lag)))} updates"
        parts.append((int(negative.sum()), text))
    count = sum(n for n, _ in parts)
    return Found(count, "; ".join(text for n, text in parts if n), {"steps": count}) if count else None


def _sampling(records: Records) -> tuple[FloatArray, FloatArray]:
    """Oldest version in every rollout batch that was sampled by one version, and the step it is first used at."""
    before = records.batches("version") - records.batches("stepped")
    oldest = before - records.batches("lag_max_updates")
    # A batch that saw several versions may well reach further back than the one before it.
    one = records.batches("lag_gen_mean_updates") == 0
    return oldest[one], records.batches("step")[one]


def _falls(version: FloatArray, step: FloatArray, words: str) -> tuple[int, str]:
    fall = np.flatnonzero(np.diff(version) < 0)
    if not len(fall):
        return 0, ""
    first = int(fall[0]) + 1
    text = f"{words} {step[first]:.0f}, from {version[first - 1]:.0f} to {version[first]:.0f}"
    return len(fall), text + (f" (and {len(fall) - 1} times more)" if len(fall) > 1 else "")


CHECK = Check(
    name="version-backwards",
    severity="problem",
    words="Versions go backwards: lag, and everything that is plotted over it, is wrong.",
    fix="Count a version up once for every applied update, and label every token with the version that sampled it.",
    look=look,
    needs=("version",),
)
