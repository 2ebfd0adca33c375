"""What every collapse definition reads and returns, and the pooling they share.

Notation (one run):

==============  ======================================================================
``V``           validation points, in order of learner step
``W``           full windows: consecutive points that together hold enough samples
``steps``       learner step of each point, shape (V,)
``samples``     completions behind each point, shape (V,)
``passes``      completions with reward > 0 among them, shape (V,)
``reward``      mean reward of the point, shape (V,)
==============  ======================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import stats

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# Ends after which no further step will come. "stopped" is a completed run that ended before its horizon on request.
FINAL_ENDS = ("horizon", "stopped", "non-finite")


@dataclass(frozen=True)
class Curve:
    """Reward of one run over learner steps, and how the run ended.

    Parameters
    ----------
    steps, samples, passes : int arrays, shape (V,)
        Learner step (strictly increasing), completions and passes of each point.
    reward : float array, shape (V,)
        Mean reward; may hold NaN, which is an observation and not a gap.
    horizon : int
        Learner steps the run was asked for (T).
    end_step : int
        Last learner step on record.
    end : str
        ``horizon``, ``stopped``, ``non-finite``, or the state of a run that has not finished (``failed``,
        ``interrupted``, ``running``, …).
    """

    steps: IntArray
    samples: IntArray
    passes: IntArray
    reward: FloatArray
    horizon: int
    end_step: int
    end: str

    def __post_init__(self) -> None:
        """Check shapes, order and counts once, here."""
        shapes = {a.shape for a in (self.steps, self.samples, self.passes, self.reward)}
        if len(shapes) != 1 or self.steps.ndim != 1:
            raise ValueError(f"steps, samples, passes, reward must share one shape (V,), got {sorted(shapes)}")
        if np.any(np.diff(self.steps) <= 0):
            raise ValueError(f"steps must increase strictly, got {self.steps.tolist()}")
        if np.any((self.passes < 0) | (self.passes > self.samples)):
            raise ValueError(
                "passes must lie in 0 … samples at every point; check the record's *_n and *_passes columns"
            )

    @property
    def final(self) -> bool:
        """Whether no further step will come."""
        return self.end in FINAL_ENDS


@dataclass(frozen=True)
class Verdict:
    """What one definition says about one run.

    ``event`` is True (it collapsed), False (it did not up to the last step on record: right-censored there) or None
    (the record cannot decide; ``evidence["reason"]`` says why). An event lies in ``(step_lo, step_hi]``, in learner
    steps. ``threshold`` repeats the parameters that decided.
    """

    name: str
    event: bool | None
    step_lo: int | None
    step_hi: int | None
    evidence: dict[str, Any]
    threshold: dict[str, Any]


class Definition(Protocol):
    """A collapse definition: a frozen dataclass of thresholds, called with a curve."""

    @property
    def name(self) -> str:
        """Name of the definition: the stem of its file."""

    @property
    def sentence(self) -> str:
        """What the definition says, with its thresholds, in plain English."""

    def __call__(self, curve: Curve) -> Verdict:
        """Judge one run."""


@dataclass(frozen=True)
class Pooled:
    """Every full window of a curve, in order of its first point; arrays of shape (W,).

    ``first`` and ``last`` are indices into the curve's points. ``reward`` is the sample-weighted mean; one
    non-finite point makes it NaN.
    """

    first: IntArray
    last: IntArray
    samples: IntArray
    passes: IntArray
    reward: FloatArray

    def __len__(self) -> int:
        """Count the windows."""
        return len(self.first)


def pool(curve: Curve, min_samples: int) -> Pooled:
    """Pool consecutive points until at least ``min_samples`` completions stand behind them.

    Window i starts at point i and ends at the earliest point that makes it full; points without enough successors
    start no window, but are still part of earlier ones.
    """
    cum_n = np.concatenate([[0], np.cumsum(curve.samples)])
    cum_k = np.concatenate([[0], np.cumsum(curve.passes)])
    first = np.arange(len(curve.steps))
    stop = np.searchsorted(cum_n, cum_n[first] + min_samples, side="left")
    full = stop < len(cum_n)
    first, stop = first[full], stop[full]
    n = cum_n[stop] - cum_n[first]
    finite = np.isfinite(curve.reward)
    cum_total = np.concatenate([[0.0], np.cumsum(np.where(finite, curve.reward, 0.0) * curve.samples)])
    cum_lost = np.concatenate([[0], np.cumsum(~finite)])
    mean = np.where(cum_lost[stop] > cum_lost[first], np.nan, (cum_total[stop] - cum_total[first]) / n)
    return Pooled(first, stop - 1, n, cum_k[stop] - cum_k[first], mean)


def clopper_pearson_upper(passes: IntArray, samples: IntArray, level: float) -> FloatArray:
    """One-sided upper confidence bound of a pass rate.

    The u that solves P(X ≤ passes | samples, u) = 1 − level, i.e. the ``level`` quantile of
    Beta(passes + 1, samples − passes); 1 where every sample passed. Clopper & Pearson, Biometrika 26 (1934).

    Parameters
    ----------
    passes, samples : int arrays of one shape
    level : float in (0, 1)
    """
    k = np.asarray(passes, dtype=np.float64)
    n = np.asarray(samples, dtype=np.float64)
    upper = stats.beta.ppf(level, k + 1, np.maximum(n - k, 1e-9))
    return np.where(k >= n, 1.0, upper)


def clopper_pearson_lower(passes: IntArray, samples: IntArray, level: float) -> FloatArray:
    """One-sided lower confidence bound of a pass rate: the mirror image of ``clopper_pearson_upper``."""
    failures = np.asarray(samples) - np.asarray(passes)
    return 1.0 - clopper_pearson_upper(failures, samples, level)


def check_range(owner: str, field: str, value: float, low: float, high: float, hint: str) -> None:
    """Raise unless low < value < high, naming field, value, what is legal and the way out."""
    if not low < value < high:
        raise ValueError(f"{owner}.{field}={value!r}: must lie in ({low}, {high}); {hint}")


def check_min_samples(owner: str, min_samples: int) -> None:
    """Raise unless a window needs at least one sample."""
    if min_samples < 1:
        raise ValueError(
            f"{owner}.min_samples={min_samples!r}: must be at least 1; 300 is what shows a rate below 1 % at 95 %"
        )


def too_few(curve: Curve, min_samples: int) -> str | None:
    """Why the curve holds no full window, or None if it holds one."""
    n = int(curve.samples.sum())
    if n >= min_samples:
        return None
    return f"undecidable: n={n} samples in the whole record, a window needs {min_samples}"


def before(curve: Curve, index: int) -> int:
    """Learner step of the point before ``index``; the step before the first one if there is none."""
    return int(curve.steps[index - 1]) if index > 0 else int(curve.steps[0]) - 1


def non_finite(curve: Curve, name: str, threshold: dict[str, Any]) -> Verdict:
    """The event of a run whose parameters stopped being finite.

    Non-finite parameters produce no completion, now or later, so the pass rate is and stays zero: every definition
    counts it as a collapse for good, at the learner step it happened. The cause is kept so that a report can tell
    it from a policy that still samples and never passes.
    """
    evidence = {"cause": "non-finite parameters"}
    return Verdict(name, True, curve.end_step - 1, curve.end_step, evidence, threshold)
