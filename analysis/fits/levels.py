"""One logistic surface for all levels of a setting: outcomes grouped by (level, S, η), its designs, and ratios in dex.

Notation as in ``fits.interaction``: x = log(S/S₀), y = log(η/η₀), level 0 the reference, M others, C grouped cells.
Columns of a design, in order: 1, y, 1[1] … 1[M], x (left out where there is one S), then what depends on S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import optimize

from stalefront.analysis.fits.base import Constant, Interval
from stalefront.analysis.fits.firth import NO_EFFECT
from stalefront.analysis.fits.logit import Array, Maximum, maximise, maximise_many, profile_ratio
from stalefront.analysis.fits.seeds import Draws, weighted_quantile

LN10 = math.log(10)
# Largest last change of a linear predictor that still counts as a maximum; p then moves in its third digit at most.
SETTLED = 1e-3


class Level(NamedTuple):
    """A level of the setting: its name, and its size where it has one on a scale that begins at 0 (else None)."""

    label: str
    size: float | None = None


def scores(levels: Sequence[Level]) -> list[float] | None:
    """z of every level; None unless all have a size, the reference 0 and at least two others more than 0.

    z = 0 for size 0, else 1 + log₁₀(size/smallest size above 0): the scale is logarithmic, and "none" counts as one
    decade below the smallest level, since log 0 has no place on it (assumed).
    """
    sizes = [v.size for v in levels]
    above = [s for s in sizes if s is not None and s > 0]
    if sizes[0] != 0 or len(above) != len(sizes) - 1 or len(set(above)) < 2:
        return None
    return [0.0, *(1 + math.log10(s / min(above)) for s in above)]


@dataclass(frozen=True)
class Cells:
    """Decided outcomes grouped by (level, S, η).

    ``m`` trials and ``k`` collapses have shape (C,), ``m_seed`` and ``k_seed`` hold those of each of ``seeds``, shape
    (seeds, C); the covariates ``x``, ``y`` are centred at ``S0``, ``lr0``.
    """

    level: NDArray[np.int64]
    S: Array
    x: Array
    y: Array
    m: Array
    k: Array
    seeds: tuple[Any, ...]
    m_seed: Array
    k_seed: Array
    S0: float
    lr0: float


def group_levels(known: Sequence[pd.DataFrame]) -> Cells:
    """Group the decided outcomes of all levels, in order, centred at the mean logs of the rows."""
    rows = pd.concat([k.assign(level=i) for i, k in enumerate(known)], ignore_index=True)
    keys = sorted(set(rows[["level", "S", "lr"]].itertuples(index=False, name=None)))
    seeds = tuple(sorted(set(rows["seed"]), key=lambda s: (str(type(s)), s)))
    place = {key: c for c, key in enumerate(keys)}
    m, k = np.zeros((len(seeds), len(keys))), np.zeros((len(seeds), len(keys)))
    for i, s, lr, seed, bad in rows[["level", "S", "lr", "seed", "collapsed"]].itertuples(index=False, name=None):
        m[seeds.index(seed), place[(i, s, lr)]] += 1
        k[seeds.index(seed), place[(i, s, lr)]] += bad
    level, S, lr = (np.array(column) for column in zip(*keys, strict=True))
    trials = m.sum(axis=0)
    s0, lr0 = (float(np.exp(np.average(np.log(v), weights=trials))) for v in (S, lr))
    return Cells(level, S, np.log(S / s0), np.log(lr / lr0), trials, k.sum(axis=0), seeds, m, k, s0, lr0)


def design(c: Cells, n_levels: int, slopes: Array | None = None) -> Array:
    """Columns of the additive model, and x·slopes[level] for ``slopes`` of shape (M + 1, J)."""
    dummies = (c.level[:, None] == np.arange(1, n_levels)).astype(np.float64)
    columns = [np.ones_like(c.x), c.y, *dummies.T, *([c.x] if len(set(c.S)) > 1 else [])]
    if slopes is not None:
        columns += list((slopes[c.level] * c.x[:, None]).T)
    return np.column_stack(columns)


@dataclass(frozen=True)
class Model:
    """A design on some cells, the maximum of its penalised likelihood, and β of every resample of the seeds.

    ``beta_draws`` has shape (D, K) and ``usable`` (D,); both are None without resamples.
    """

    cells: Cells
    X: Array
    at: Maximum
    draws: Draws | None = None
    beta_draws: Array | None = None
    usable: NDArray[np.bool_] | None = None

    @property
    def rises(self) -> bool:
        """Whether collapse becomes likelier with the learning rate; without it there is no frontier to move."""
        return bool(self.at.beta[1] > NO_EFFECT)

    @property
    def separated(self) -> bool:
        """Whether a plane splits collapses from survivals, so that plain maximum likelihood diverges."""
        bad, good = self.cells.k > 0, self.cells.k < self.cells.m
        a_ub = np.concatenate([-self.X[bad], self.X[good]])
        free = [(None, None)] * self.X.shape[1]
        found = optimize.linprog(np.zeros(len(free)), A_ub=a_ub, b_ub=-np.ones(len(a_ub)), bounds=free)
        return bool(found.status == 0)


def fit_model(c: Cells, X: Array, draws: Draws | None) -> Model:
    """Maximise on a design, for the data and for every resample of the seeds."""
    at = maximise(X, c.m, c.k, np.eye(X.shape[1]))
    if not at.converged:
        at = _settled(X, c.m, c.k, at.beta)
    if draws is None:
        return Model(c, X, at)
    counts = draws.counts[:, [draws.seeds.index(s) for s in c.seeds]]
    trials, collapses = counts @ c.m_seed, counts @ c.k_seed
    beta, usable = maximise_many(X, trials, collapses)
    for i in np.flatnonzero(~usable):
        found = _settled(X, trials[i], collapses[i], beta[i])
        beta[i], usable[i] = found.beta, found.converged and math.isfinite(found.ll)
    return Model(c, X, at, draws, beta, usable & (beta[:, 1] > NO_EFFECT))


def _settled(X: Array, m: Array, k: Array, start: Array) -> Maximum:
    """Go on from where scoring ended: beside a separating plane it comes nearer by a few percent a step only."""
    return maximise(X, m, k, np.eye(X.shape[1]), start=start, tolerance=SETTLED)


def ratio_dex(model: Model, index: int, level: float, factor: float, meaning: str) -> Constant:
    """factor·β[index]/(β_η ln 10), with the outer ends of its profile and its bootstrap interval.

    A resample without a usable fit counts as unbounded on both sides.
    """
    c, b = model.cells, model.at.beta
    found = profile_ratio(
        model.X,
        c.m,
        c.k,
        num=index,
        den=1,
        free=tuple(i for i in range(len(b)) if i not in (1, index)),
        estimate=-float(b[index] / b[1]),
        best=model.at.ll,
        scale=max(1.0, 1.0 / float(b[1])),
        level=level,
    )
    # profile_ratio has the sign of a contour, −β[num]/β[den].
    lo, hi, kind = -found.hi * factor / LN10, -found.lo * factor / LN10, "profile"
    if model.draws is not None and model.beta_draws is not None and model.usable is not None:
        steep = np.where(model.usable, model.beta_draws[:, 1], 1.0)
        value = factor / LN10 * model.beta_draws[:, index] / steep
        low, high = (np.where(model.usable, value, end) for end in (-math.inf, math.inf))
        tail = (1 - level) / 2
        lo = min(lo, weighted_quantile(low, model.draws.weight, tail))
        hi = max(hi, -weighted_quantile(-high, model.draws.weight, tail))
        kind = "outer of profile and bootstrap"
    interval = Interval(lo if math.isfinite(lo) else None, hi if math.isfinite(hi) else None, kind, level)
    return Constant(factor / LN10 * float(b[index] / b[1]), interval, "dex", meaning)
