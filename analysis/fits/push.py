"""How far a method pushes the collapse contour: η50 of an arm over η50 of its reference, at each S and over S.

Notation (all in log₁₀ of a learning rate, so that a push is a difference):

==========  ==============================================================================================
``a``       log η50 of the arm, ``r`` that of the reference
``d``       a − r, the push; 10^d is the ratio, also of S·η50, since S is the same
``[l, u]``  what is known of a: l = u where the grid brackets it, one of them infinite where it is censored
``D``       resamples of the seeds
==========  ==============================================================================================

η50 at the S of the grid comes from one penalised logistic surface of an arm (``fits.firth``), with a single S from the
same regression on log η alone. An estimate beyond the grid is not believed: η50 is then at least the largest, or at
most the smallest, learning rate run at that S.

Two intervals are computed. *Profile*: the two profile intervals of a and r combined as if independent, lo = d −
√((a − a_lo)² + (r_hi − r)²) and hi alike (method of variance estimates recovery: Zou and Donner, Stat. Med. 27 (2008)).
*Bootstrap*, from three seeds on: seeds are drawn with replacement, the same ones for both arms, and both are fitted
anew; with up to five seeds every draw is enumerated with its probability. Few seeds that agree give a bootstrap of no
width, whatever the grid's step, so the one shown is the outer end of the two on each side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from stalefront.analysis.fits.base import Constant, Fit, Interval, decided, input_hash
from stalefront.analysis.fits.firth import NO_EFFECT, eta50_at, fit_firth, group
from stalefront.analysis.fits.logit import Array, Maximum, maximise, maximise_many, profile_ratio
from stalefront.analysis.fits.seeds import BOOTSTRAP_SEED, MAX_ENUMERATED, Draws, weighted_quantile

METHOD = (
    "η50 by Firth's logistic regression of each arm; the interval is the outer of two: profile likelihoods combined as "
    "independent, and (from three seeds on) the paired bootstrap over seeds"
)


@dataclass(frozen=True)
class Span:
    """What is known of a number: lo = hi if it is estimated, an infinite end if it is censored there.

    ``profile`` and ``bootstrap`` are intervals (lo, hi), None where not computed.
    """

    lo: float
    hi: float
    profile: tuple[float, float] | None = None
    bootstrap: tuple[float, float] | None = None

    @property
    def censoring(self) -> str:
        """``none``, ``right`` (at least lo), ``left`` (at most hi) or ``both`` (nothing is known)."""
        if math.isinf(self.lo):
            return "both" if math.isinf(self.hi) else "left"
        return "right" if math.isinf(self.hi) else "none"

    @property
    def outer(self) -> tuple[float, float] | None:
        """The ends that reach further out of the intervals there are; a censored side is open."""
        found = [i for i in (self.profile, self.bootstrap) if i is not None]
        if not found:
            return None
        lo, hi = min(i[0] for i in found), max(i[1] for i in found)
        return (-math.inf if math.isinf(self.lo) else lo, math.inf if math.isinf(self.hi) else hi)

    @property
    def kind(self) -> str:
        """Which intervals :attr:`outer` is made of."""
        return "profile" if self.bootstrap is None else "outer of profile and bootstrap"

    def row(self) -> dict[str, Any]:
        """Ratios for ``fits.json``: the estimate or its bound, censoring, and every interval."""
        out: dict[str, Any] = {"censoring": self.censoring, "lo": _power(self.lo), "hi": _power(self.hi)}
        for name in ("profile", "bootstrap", "outer"):
            ends = getattr(self, name)
            out[name] = None if ends is None else [_power(ends[0]), _power(ends[1])]
        return out

    def constant(self, unit: str, meaning: str, level: float, factor: float = 1.0) -> Constant:
        """As a constant: a value where it is estimated, and the interval; a censored number has no value."""
        ends = self.outer or (self.lo, self.hi)
        lo, hi = (None if p is None else factor * p for p in map(_power, ends))
        value = _power(self.lo) if self.censoring == "none" else None
        interval = Interval(lo, hi, self.kind, level) if self.outer else None
        return Constant(None if value is None else factor * value, interval, unit, meaning)


def _power(log: float) -> float | None:
    """10^log, None if it is unbounded or no float64."""
    return 10.0**log if math.isfinite(log) and abs(log) < 300 else None


@dataclass(frozen=True, eq=False)
class Located:
    """log₁₀ η50 of one arm at each of its S.

    Parameters
    ----------
    known : DataFrame
        Decided outcomes.
    S : tuple of float
    spans : tuple of Span
        η50 with its profile interval.
    draws : (lo, hi) or None
        What every resample of the seeds says, shapes (D, number of S).
    firth : Fit or None
        The surface, None with a single S.
    """

    known: pd.DataFrame
    S: tuple[float, ...]
    spans: tuple[Span, ...]
    draws: tuple[Array, Array] | None
    level: float
    cache: dict[tuple[float, ...], Span] = field(default_factory=dict)

    def mean(self, S: tuple[float, ...]) -> Span:
        """Mean of log η50 over the given S, with the profile interval of the part that is estimated."""
        if S not in self.cache:
            self.cache[S] = self._mean(S)
        return self.cache[S]

    def _mean(self, S: tuple[float, ...]) -> Span:
        spans = [self.spans[self.S.index(s)] for s in S]
        if len(spans) == 1:
            return spans[0]
        lo, hi = (float(np.mean([getattr(s, end) for s in spans])) for end in ("lo", "hi"))
        inside = [s for s, span in zip(S, spans, strict=True) if span.censoring == "none"]
        if not inside:
            return Span(lo, hi, (lo, hi))
        # The surface is linear in log S, so its mean over some S is its value at their geometric mean.
        middle = _surface_at(self.known, float(np.exp(np.mean(np.log(inside)))), self.level)
        share = len(inside) / len(S)
        assert middle.profile is not None
        below, above = share * (middle.lo - middle.profile[0]), share * (middle.profile[1] - middle.lo)
        return Span(lo, hi, (lo - below, hi + above))

    def mean_draws(self, S: tuple[float, ...]) -> tuple[Array, Array] | None:
        """The same mean in every resample, shapes (D,)."""
        if self.draws is None:
            return None
        columns = [self.S.index(s) for s in S]
        return self.draws[0][:, columns].mean(axis=1), self.draws[1][:, columns].mean(axis=1)


def locate(
    frame: pd.DataFrame, *, definition: str, arm: str, draws: Draws | None, level: float, firth: Fit | None = None
) -> Located:
    """Locate η50 of one arm at each S.

    Parameters
    ----------
    frame : DataFrame
        Outcome frame (``fits.base``).
    definition, arm : str
        Labels of the fit.
    draws : Draws, optional
        Resamples of the seeds of all arms compared.
    level : float
        Confidence of the intervals.
    firth : Fit, optional
        The surface of the same frame, if it is fitted already.
    """
    known = decided(frame)
    S = tuple(float(s) for s in sorted(set(known["S"])))
    if len(S) == 1:
        estimates = {S[0]: _single(known, level)}
    else:
        fit = firth or fit_firth(frame, definition=definition, arm=arm, level=level)
        estimates = {s: _log10(fit.constants.get(f"eta50[S={s:g}]")) for s in S}
    spans = tuple(_believed(known[known["S"] == s], estimates[s]) for s in S)
    return Located(known, S, spans, None if draws is None else _resampled(known, S, spans, draws), level)


def _log10(constant: Constant | None) -> Span | None:
    """A learning rate with its profile interval, in log₁₀."""
    if constant is None or constant.value is None:
        return None
    value = math.log10(constant.value)
    ends = constant.interval or Interval(None, None, "profile")
    lo = -math.inf if ends.lo is None else math.log10(ends.lo)
    hi = math.inf if ends.hi is None else math.log10(ends.hi)
    return Span(value, value, (lo, hi))


def _believed(at_s: pd.DataFrame, estimate: Span | None) -> Span:
    """The estimate at one S, or the edge of the grid where it is beyond it or every run ended alike."""
    lo, hi = (math.log10(float(f(at_s["lr"]))) for f in (min, max))
    bad = int(at_s["collapsed"].sum())
    if bad == 0 or (estimate is not None and estimate.lo > hi):
        return Span(hi, math.inf, (hi, math.inf))
    if bad == len(at_s) or (estimate is not None and estimate.lo < lo):
        return Span(-math.inf, lo, (-math.inf, lo))
    return estimate or Span(-math.inf, math.inf)


def _surface_at(known: pd.DataFrame, s: float, level: float) -> Span:
    """η50 of the surface at any S."""
    g = group(known)
    full = maximise(np.column_stack([np.ones_like(g.x), g.x, g.y]), g.m, g.k, np.eye(3))
    found = _log10(eta50_at(g, full, s, level))
    assert found is not None
    return found


def _single(known: pd.DataFrame, level: float) -> Span | None:
    """η50 from outcomes at a single S: Firth's regression on log η alone."""
    g = group(known)
    if len(g.lr) < 2 or g.k.sum() in (0, g.m.sum()):
        return None
    X = np.column_stack([np.ones_like(g.y), g.y])
    full: Maximum = maximise(X, g.m, g.k, np.eye(2))
    if full.beta[1] <= NO_EFFECT:
        return None
    ratio = float(-full.beta[0] / full.beta[1])
    scale = max(1.0, 1.0 / float(full.beta[1]))
    ends = profile_ratio(X, g.m, g.k, num=0, den=1, free=(), estimate=ratio, best=full.ll, scale=scale, level=level)
    value, lo, hi = ((math.log(g.lr0) + v) / math.log(10) for v in (ratio, ends.lo, ends.hi))
    return Span(value, value, (lo, hi))


def _resampled(known: pd.DataFrame, S: tuple[float, ...], spans: tuple[Span, ...], draws: Draws) -> tuple[Array, Array]:
    """log₁₀ η50 at each S in every resample, as ends; a censored S keeps its bound, so that only estimates vary."""
    g = group(known)
    place = {key: c for c, key in enumerate(zip(g.S, g.lr, strict=True))}
    seeds = {seed: i for i, seed in enumerate(draws.seeds)}
    m, k = np.zeros((len(seeds), len(place))), np.zeros((len(seeds), len(place)))
    for s, lr, seed, bad in known[["S", "lr", "seed", "collapsed"]].itertuples(index=False, name=None):
        m[seeds[seed], place[(s, lr)]] += 1
        k[seeds[seed], place[(s, lr)]] += bad
    trials, collapses = draws.counts @ m, draws.counts @ k
    slope = np.log(np.array(S) / g.S0)
    columns = [np.ones_like(g.x), g.x, g.y] if len(S) > 1 else [np.ones_like(g.y), g.y]
    beta, usable = maximise_many(np.column_stack(columns), trials, collapses)
    mixed = (collapses.sum(axis=1) > 0) & (collapses.sum(axis=1) < trials.sum(axis=1))
    usable &= mixed & (beta[:, -1] > NO_EFFECT)
    steep = np.where(usable, beta[:, -1], 1.0)
    along = beta[:, 1:2] * slope if len(S) > 1 else 0.0
    value = (math.log(g.lr0) - (beta[:, :1] + along) / steep[:, None]) / math.log(10)
    lo, hi = (np.where(usable[:, None], value, end) for end in (-math.inf, math.inf))
    none, every = collapses.sum(axis=1) == 0, collapses.sum(axis=1) == trials.sum(axis=1)
    lo[none & ~every] = np.log10(g.lr.max())
    hi[every & ~none] = np.log10(g.lr.min())
    for column, span in enumerate(spans):
        if span.censoring != "none":
            lo[:, column], hi[:, column] = span.lo, span.hi
    return lo, hi


def difference(arm: Located, reference: Located, S: tuple[float, ...], draws: Draws | None) -> Span:
    """Push of an arm against its reference, averaged over the given S.

    Parameters
    ----------
    arm, reference : Located
    S : tuple of float
        Values of S that both have.
    draws : Draws, optional
        The resamples that both were located with.
    """
    a, r = arm.mean(S), reference.mean(S)
    lo, hi = a.lo - r.hi, a.hi - r.lo
    profile = None
    if a.profile and r.profile:
        profile = (
            lo - math.hypot(_width(a.lo, a.profile[0]), _width(r.profile[1], r.hi)),
            hi + math.hypot(_width(a.profile[1], a.hi), _width(r.lo, r.profile[0])),
        )
    bootstrap = None
    ends = arm.mean_draws(S), reference.mean_draws(S)
    if draws is not None and ends[0] is not None and ends[1] is not None:
        low, high = ends[0][0] - ends[1][1], ends[0][1] - ends[1][0]
        tail = (1 - arm.level) / 2
        bootstrap = (weighted_quantile(low, draws.weight, tail), -weighted_quantile(-high, draws.weight, tail))
    return Span(lo, hi, profile, bootstrap)


def _width(outer: float, inner: float) -> float:
    """Distance between an end of an interval and the number itself; 0 where both are the same infinity."""
    return 0.0 if outer == inner else abs(outer - inner)


def comparable(arm: Located, reference: Located) -> tuple[float, ...]:
    """The S at which the push is at least bounded on one side."""
    shared = [s for s in arm.S if s in reference.S]
    return tuple(s for s in shared if difference(arm, reference, (s,), None).censoring != "both")


def fit_push(
    frame: pd.DataFrame,
    arm: Located,
    reference: Located,
    draws: Draws | None,
    *,
    definition: str,
    labels: tuple[str, str],
) -> Fit:
    """Push of one arm under one definition.

    Parameters
    ----------
    frame : DataFrame
        Outcome frame of the arm.
    arm, reference : Located
    draws : Draws, optional
        The resamples that both were located with.
    definition : str
        Collapse definition.
    labels : (str, str)
        Arm and reference.

    Returns
    -------
    Fit
        ``S_eta50[S=…]``, ``push[S=…]`` and ``push`` (their geometric mean over the S in ``rows[-1]["over"]``, those at
        which it is bounded); ``rows`` hold every interval.
    """
    level = arm.level
    constants: dict[str, Constant] = {}
    rows: list[dict[str, Any]] = []
    for s, span in zip(arm.S, _with_bootstrap(arm, draws), strict=True):
        name = f"[S={s:g}]"
        constants[f"S_eta50{name}"] = span.constant("learning rate", f"S·η50 at S={s:g}", level, factor=s)
        row: dict[str, Any] = {"S": s, "eta50": span.row(), "push": None}
        if s in reference.S:
            push = difference(arm, reference, (s,), draws)
            constants[f"push{name}"] = push.constant("1", f"η50 over that of the reference at S={s:g}", level)
            row["push"] = push.row()
        rows.append(row)
    over = comparable(arm, reference)
    pooled = difference(arm, reference, over, draws) if over else Span(-math.inf, math.inf)
    constants["push"] = pooled.constant("1", "geometric mean over S of η50 over that of the reference", level)
    rows.append({"S": None, "over": list(over), "push": pooled.row(), "reference": labels[1]})
    bad = int(arm.known["collapsed"].sum())
    return Fit(
        name="push",
        definition=definition,
        arm=labels[0],
        constants=constants,
        n=len(arm.known),
        n_events=bad,
        n_left=sum(s.censoring == "left" for s in arm.spans),
        n_right=sum(s.censoring == "right" for s in arm.spans),
        n_undecided=len(frame) - len(arm.known),
        method=METHOD,
        settings={"level": level, "reference": labels[1], "n_reference": len(reference.known), **_settings(draws)},
        input_hash=input_hash(frame),
        rows=rows,
    )


def _with_bootstrap(arm: Located, draws: Draws | None) -> list[Span]:
    """η50 at each S with its own bootstrap interval."""
    if draws is None or arm.draws is None:
        return list(arm.spans)
    tail = (1 - arm.level) / 2
    out = []
    for column, span in enumerate(arm.spans):
        low, high = arm.draws[0][:, column], arm.draws[1][:, column]
        ends = (weighted_quantile(low, draws.weight, tail), -weighted_quantile(-high, draws.weight, tail))
        out.append(Span(span.lo, span.hi, span.profile, ends))
    return out


def _settings(draws: Draws | None) -> dict[str, Any]:
    if draws is None:
        return {"bootstrap": None}
    exact = len(draws.seeds) <= MAX_ENUMERATED
    seed = None if exact else BOOTSTRAP_SEED
    return {"bootstrap": {"seeds": len(draws.seeds), "draws": len(draws.counts), "exact": exact, "rng_seed": seed}}
