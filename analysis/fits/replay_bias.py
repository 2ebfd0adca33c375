"""From which lag on do replayed routes cost more than the mismatch they take away?

Notation (one setting of a sweep; a row of the frame a run and a whole lag, over the steps up to the first zero):

=============  ===========================================================================================
``ℓ``          realised lag of the tokens in updates, rounded to a whole number
``gap(ℓ)``     mean K3 between θ under the replayed routes and θ under its own, over the steps that measured it
``removed``    mean K3 of old/μ without replay, over all lags
=============  ===========================================================================================

Replay *biases* from the first ℓ at which gap(ℓ) − gap(ℓ₀) > removed, ℓ₀ the smallest lag. At ℓ₀ = 0 the weights are
those that sampled: the gap there is no effect of age (0 for routes of the trainer, the flips themselves for routes of
the sampler), and for small log-ratios of independent origin K3 ≈ ½E[d²] adds up, so the difference is what age has
added. The same for the whole gap, gap(ℓ) > removed, is given beside it. Between the lags the gap is taken to be
non-decreasing (isotonic regression, weighted by steps), so that noise makes one crossing of it and not several; a
mean gap that is not finite exceeds anything.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize

from stalefront.analysis.fits.base import Constant, Fit, Interval
from stalefront.analysis.fits.seeds import BOOTSTRAP_SEED, MAX_ENUMERATED, Draws, draws_of, weighted_quantile
from stalefront.analysis.verdicts.base import FloatArray as Array

# Column of a step record → its name here. A row holds `<name>_sum` and `<name>_n` over the steps that measured it.
COLUMNS = {
    "replay_gap_k3_nats": "gap",
    "route_drift_frac": "drift",
    "expert_flip_frac": "flip",
    "theta_mu_k3_nats": "theta_mu",
    # Whatever stands as old in the loss: the sampling weights by the trainer's forward.
    "mismatch_k3_nats": "old_mu",
}
KEYS = ("cell_id", "replay", "S", "lr", "seed", "lag")
NONE = "none"
# The rows that count end where the record first touches zero: afterwards the gradient vanishes.
DEFINITION = "first_zero"
METHOD = (
    "isotonic mean of the replay gap over whole lags against the mean K3 of old/μ without replay; interval: bootstrap "
    "over seeds from three seeds on, the range of the seeds with two"
)


def fit_replay_bias(frame: pd.DataFrame, *, replay: str, arm: str, level: float = 0.95) -> Fit:
    """Find the lag from which one kind of replay biases, in one setting.

    Parameters
    ----------
    frame : DataFrame
        Rows of the setting, those without replay included: ``KEYS`` and sum and count of each of ``COLUMNS``.
    replay : str
        Choice of the runs judged, e.g. ``r3``.
    arm : str
        Label of the setting.
    level : float
        Confidence of the bootstrap interval.

    Returns
    -------
    Fit
        ``start_updates`` and ``start_whole_updates`` (value None where no lag of the record exceeds), ``removed_nats``,
        ``gap_first_nats`` and ``gap_last_nats`` (at the smallest and largest lag), ``drift_last_frac``. ``n`` counts
        runs, ``n_events`` and ``n_right`` seeds with and without a start of their own; ``rows`` hold the means.
    """
    mine = frame[(frame["replay"] == replay) & (frame["gap_n"] > 0)]
    plain = frame[(frame["replay"] == NONE) & (frame["old_mu_n"] > 0)]
    seeds = sorted(set(mine["seed"]) & set(plain["seed"]), key=lambda s: (str(type(s)), s))
    used = pd.concat([part[part["seed"].isin(seeds)] for part in (mine, plain)])
    constants: dict[str, Constant] = {}
    rows: list[dict[str, Any]] = []
    events, notes = 0, [] if seeds else [_missing(mine, plain, replay)]
    if seeds:
        means = _Means(used, replay, seeds)
        constants, events = _starts(means, draws_of(seeds), level)
        constants |= means.constants()
        rows = means.rows()
        notes += means.notes()
    return Fit(
        name="replay_bias",
        definition=DEFINITION,
        arm=f"{arm}, replay={replay}" if arm else f"replay={replay}",
        constants=constants,
        n=used["cell_id"].nunique(),
        n_events=events,
        n_left=0,
        n_right=len(seeds) - events,
        n_undecided=0,
        method=METHOD,
        settings={"level": level, "replay": replay, "seeds": len(seeds), **_bootstrap(len(seeds))},
        input_hash=hashlib.sha256(used.sort_values(list(KEYS[:2] + KEYS[5:])).to_csv(index=False).encode()).hexdigest(),
        rows=rows,
        notes=notes,
    )


def start_lag(lags: Array, gap: Array, weight: Array, removed: float, *, whole: bool) -> float:
    """First lag at which the isotonic gap, less its value at the first lag unless ``whole``, exceeds ``removed``.

    Parameters
    ----------
    lags, gap, weight : float arrays, shape (N,)
        Increasing lags, mean gaps, steps behind each; a lag of weight 0 was not seen.
    removed : float
        What replay takes away. If it is not finite, nothing exceeds it.

    Returns
    -------
    float
        inf where no lag exceeds.
    """
    seen = weight > 0
    finite = seen & np.isfinite(gap)
    exceeds = np.zeros(len(lags), dtype=np.bool_)
    if finite.any():
        fitted = optimize.isotonic_regression(gap[finite], weights=weight[finite]).x
        base = 0.0 if whole else float(fitted[0])
        exceeds[finite] = fitted - base > removed
    exceeds[seen & ~finite] = math.isfinite(removed)
    return float(lags[exceeds][0]) if exceeds.any() else math.inf


class _Means:
    """Sums and counts by seed and lag of one kind of replay, and of the runs without; resampled by weights of seeds."""

    def __init__(self, used: pd.DataFrame, replay: str, seeds: list[Any]) -> None:
        mine, plain = used[used["replay"] == replay], used[used["replay"] == NONE]
        self.lags = np.array(sorted(set(mine["lag"])), dtype=np.float64)
        self.gap, self.gap_n, self.drift, self.drift_n = (
            self._table(mine, seeds, name) for name in ("gap_sum", "gap_n", "drift_sum", "drift_n")
        )
        # NumPy sums, since those of pandas leave NaN out.
        self.removed, self.removed_n = (
            np.array([plain[plain["seed"] == s][c].to_numpy(dtype=np.float64).sum() for s in seeds])
            for c in ("old_mu_sum", "old_mu_n")
        )
        self.n_seeds = len(seeds)

    def _table(self, rows: pd.DataFrame, seeds: list[Any], name: str) -> Array:
        """Shape (seeds, lags); several runs of a seed add up, and NaN stays NaN."""
        out = np.zeros((len(seeds), len(self.lags)))
        for seed, lag, value in rows[["seed", "lag", name]].itertuples(index=False, name=None):
            out[seeds.index(seed), int(np.searchsorted(self.lags, lag))] += value
        return out

    def start(self, counts: Array, *, whole: bool) -> float:
        """Start with every seed counted so often, shape (seeds,); one that is not drawn adds nothing, not NaN · 0."""
        drawn = counts > 0
        c = counts[drawn]
        n = c @ self.gap_n[drawn]
        gap = (c @ self.gap[drawn]) / np.where(n > 0, n, np.nan)
        removed = float(c @ self.removed[drawn] / (c @ self.removed_n[drawn]))
        return start_lag(self.lags, gap, n, removed, whole=whole)

    def mean(self, total: Array, n: Array) -> Array:
        """Mean at each lag over all seeds, NaN where none was measured."""
        count = n.sum(axis=0)
        return np.asarray(total.sum(axis=0) / np.where(count > 0, count, np.nan))

    def constants(self) -> dict[str, Constant]:
        """What the start is made of, without intervals."""
        gap = self.mean(self.gap, self.gap_n)
        drift = self.mean(self.drift, self.drift_n)
        removed = float(self.removed.sum() / self.removed_n.sum())
        texts = {
            "removed_nats": (removed, "nats/token", "mean K3 of old/μ without replay"),
            "gap_first_nats": (float(gap[0]), "nats/token", f"replay gap at a lag of {self.lags[0]:g}"),
            "gap_last_nats": (float(gap[-1]), "nats/token", f"replay gap at a lag of {self.lags[-1]:g}"),
            "drift_last_frac": (float(drift[-1]), "share", f"route drift at a lag of {self.lags[-1]:g}"),
            "lag_first_updates": (float(self.lags[0]), "updates", "smallest lag with a replay gap on record"),
            "lag_last_updates": (float(self.lags[-1]), "updates", "largest lag with a replay gap on record"),
        }
        return {name: Constant(value, None, unit, meaning) for name, (value, unit, meaning) in texts.items()}

    def rows(self) -> list[dict[str, Any]]:
        """Means at each lag."""
        columns = (self.mean(self.gap, self.gap_n), self.gap_n.sum(axis=0), self.mean(self.drift, self.drift_n))
        return [
            {"lag": float(lag), "gap_nats": float(g), "n": int(n), "drift_frac": float(d)}
            for lag, g, n, d in zip(self.lags, *columns, strict=True)
        ]

    def notes(self) -> list[str]:
        """What a reader must know about the means."""
        out = []
        if self.lags[0] > 0:
            out.append(f"the smallest lag on record is {self.lags[0]:g}: what age adds is counted from there")
        bad = int((~np.isfinite(self.mean(self.gap, self.gap_n))).sum())
        if bad:
            out.append(f"the mean gap is not finite at {bad} of {len(self.lags)} lags, which counts as exceeding")
        if not math.isfinite(float(self.removed.sum())):
            out.append("the mismatch without replay is not finite: nothing exceeds it")
        return out


def _missing(mine: pd.DataFrame, plain: pd.DataFrame, replay: str) -> str:
    if not len(mine):
        return f"no step of replay={replay} measured the replay gap"
    return f"no run without replay to hold replay={replay} against" if not len(plain) else "no seed has both"


def _starts(means: _Means, draws: Draws | None, level: float) -> tuple[dict[str, Constant], int]:
    """Both starts with their intervals, and the number of seeds with a start of their own."""
    each = np.eye(means.n_seeds)
    out, events = {}, 0
    for name, whole, what in (
        ("start_updates", False, "the part of the replay gap that age has added exceeds"),
        ("start_whole_updates", True, "the whole replay gap exceeds"),
    ):
        value = means.start(np.ones(means.n_seeds), whole=whole)
        alone = np.array([means.start(row, whole=whole) for row in each])
        meaning = f"first lag at which {what} the mismatch without replay"
        interval = None
        if draws is not None:
            found = np.array([means.start(row, whole=whole) for row in draws.counts])
            ends = [weighted_quantile(found, draws.weight, q) for q in ((1 - level) / 2, (1 + level) / 2)]
            interval = _interval(ends[0], ends[1], "bootstrap", level)
        elif means.n_seeds > 1:
            interval = _interval(float(alone.min()), float(alone.max()), "range of the seeds", None)
        out[name] = Constant(value if math.isfinite(value) else None, interval, "updates", meaning)
        if not whole:
            events = int(np.isfinite(alone).sum())
    return out, events


def _interval(lo: float, hi: float, kind: str, level: float | None) -> Interval:
    return Interval(lo if math.isfinite(lo) else None, hi if math.isfinite(hi) else None, kind, level)


def _bootstrap(n_seeds: int) -> dict[str, Any]:
    if draws_of(range(n_seeds)) is None:
        return {"bootstrap": None}
    exact = n_seeds <= MAX_ENUMERATED
    return {"bootstrap": {"exact": exact, "rng_seed": None if exact else BOOTSTRAP_SEED}}
