"""t·η of the runs that collapsed: does the learning rate spent until collapse come out constant?

Notation (collapsed cells only, n of them): x = representative t·η, the midpoint of the event interval in Σ lr
(plain t·η at a constant rate); t its midpoint in learner steps. The paper's law is t·η = const
(arXiv 2607.01083 §4.3), conditional on collapse: every number here is, and the cells that did not collapse are
reported as right-censored values, those that cannot be decided as a count, never left out in silence.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import stats

from stalefront.analysis.fits.base import Constant, Fit, Interval, decided, input_hash
from stalefront.analysis.verdicts.base import FloatArray

# Assumed: fewer seeds than this cannot stand for the population of seeds, so none are resampled.
MIN_SEEDS_FOR_BOOTSTRAP = 5
N_BOOTSTRAP = 2000
BOOTSTRAP_SEED = 20260701


def fit_t_eta(frame: pd.DataFrame, *, definition: str, arm: str, level: float = 0.95) -> Fit:
    """Summarise t·η among collapsed cells of one arm.

    Parameters
    ----------
    frame : DataFrame
        Outcome frame (``fits.base``).
    definition, arm : str
        Labels carried into the fit.
    level : float
        Confidence of the intervals.

    Returns
    -------
    Fit
        ``t_eta`` (geometric mean), ``t_eta_low`` and ``t_eta_high`` (the same with every event at either end of its
        interval), ``max_over_min``, ``cv``, ``slope`` (d log t/d log η among events), ``largest_censored``. Interval
        of ``t_eta``: cluster bootstrap over seeds with at least 5 of them, else Student's t on the logs.
    """
    known = decided(frame)
    events = known[known["collapsed"]]
    usable, t_eta, t = _representative(events)
    notes = [] if len(usable) == len(events) else [f"{len(events) - len(usable)} event(s) at t·η = 0 have no logarithm"]
    # Whether an undecided run survived is not known: it is no right-censored one.
    censored = known[~known["collapsed"]]["censor_t_eta"].dropna().astype(float)
    constants: dict[str, Constant] = {}
    kind = "none"
    if len(usable):
        constants, kind = _constants(usable, t_eta, t, level)
    if len(censored):
        meaning = "largest Σ lr spent by a run that did not collapse"
        constants["largest_censored"] = Constant(float(censored.max()), None, "learning rate × steps", meaning)
        notes.append(f"{len(censored)} run(s) without an event are right-censored and enter no mean here")
    if len(usable):
        notes.append("conditional on collapse: runs that would collapse later are missing, which shortens the times")
    return Fit(
        name="t_eta",
        definition=definition,
        arm=arm,
        constants=constants,
        n=len(usable),
        n_events=len(events),
        n_left=0,
        n_right=len(censored),
        n_undecided=len(frame) - len(known),
        method=f"geometric mean over collapsed cells; interval: {kind}",
        settings={"level": level, "n_bootstrap": N_BOOTSTRAP, "bootstrap_seed": BOOTSTRAP_SEED, "interval": kind},
        input_hash=input_hash(frame),
        rows=[{"censor_t_eta": float(v)} for v in sorted(censored)],
        notes=notes,
    )


def _representative(events: pd.DataFrame) -> tuple[pd.DataFrame, FloatArray, FloatArray]:
    """Events with a positive midpoint, their t·η and their t in learner steps."""
    t_eta = _midpoint(events, "t_eta")
    t = _midpoint(events, "step")
    keep = (t_eta > 0) & (t > 0)
    return events[keep], t_eta[keep], t[keep]


def _midpoint(events: pd.DataFrame, name: str) -> FloatArray:
    ends = events[[f"{name}_lo", f"{name}_hi"]].to_numpy(dtype=np.float64)
    return np.asarray(ends.mean(axis=1), dtype=np.float64)


def _constants(events: pd.DataFrame, t_eta: FloatArray, t: FloatArray, level: float) -> tuple[dict[str, Constant], str]:
    """Mean, spread and slope, with the kind of interval used."""
    logs = np.log(t_eta)
    unit = "learning rate × steps"
    interval = _interval(events, logs, level)
    mean = float(np.exp(logs.mean()))
    constants = {"t_eta": Constant(mean, interval, unit, "geometric mean of Σ lr at collapse")}
    for end in ("lo", "hi"):
        values = events[f"t_eta_{end}"].to_numpy(dtype=np.float64)
        name = {"lo": "low", "hi": "high"}[end]
        value = float(np.exp(np.log(values).mean())) if np.all(values > 0) else 0.0
        constants[f"t_eta_{name}"] = Constant(value, None, unit, f"the same with every event at its {name} end")
    constants["max_over_min"] = Constant(float(t_eta.max() / t_eta.min()), None, "1", "largest over smallest t·η")
    cv = float(t_eta.std(ddof=1) / t_eta.mean()) if len(t_eta) > 1 else math.nan
    constants["cv"] = Constant(cv if math.isfinite(cv) else None, None, "1", "standard deviation over mean of t·η")
    slope = _slope(events["lr"].to_numpy(dtype=np.float64), t, level)
    if slope is not None:
        constants["slope"] = slope
    return constants, interval.kind if interval else "none (one event)"


def _interval(events: pd.DataFrame, logs: FloatArray, level: float) -> Interval | None:
    """Interval of the geometric mean."""
    if len(logs) < 2:
        return None
    seeds = events["seed"].astype(str).to_numpy()
    names = sorted(set(seeds))
    if len(names) < MIN_SEEDS_FOR_BOOTSTRAP:
        half = float(stats.t.ppf((1 + level) / 2, len(logs) - 1)) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
        centre = float(logs.mean())
        return Interval(math.exp(centre - half), math.exp(centre + half), "t", level)
    totals = np.array([logs[seeds == s].sum() for s in names])
    counts = np.array([(seeds == s).sum() for s in names])
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = rng.integers(len(names), size=(N_BOOTSTRAP, len(names)))
    means = totals[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    lo, hi = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(math.exp(lo), math.exp(hi), "bootstrap", level)


def _slope(lr: FloatArray, t: FloatArray, level: float) -> Constant | None:
    """Least-squares d log t/d log η among events, with Student's t interval; −1 is t·η = const."""
    meaning = "d log t / d log η among collapsed runs"
    if len(t) < 3 or len(set(lr)) < 2:
        return None
    x, y = np.log(lr) - np.log(lr).mean(), np.log(t) - np.log(t).mean()
    slope = float(x @ y / (x @ x))
    residual = y - slope * x
    error = math.sqrt(float(residual @ residual) / (len(t) - 2) / float(x @ x))
    half = float(stats.t.ppf((1 + level) / 2, len(t) - 2)) * error
    return Constant(slope, Interval(slope - half, slope + half, "t", level), "1", meaning)
