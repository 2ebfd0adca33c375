"""Is S·η_max constant? Products of the brackets, the slopes they admit, and the interval-normal likelihoods.

Notation: unit u with staleness S_u has log η_max,u ∈ [log L_u, log U_u), L = 0 left-censored, U = ∞ right-censored;
log η_max = a + s·log S + σε. s = −1 is the 1/S law of arXiv 2607.01083, s = 0 a flat frontier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize, stats
from scipy.special import log_ndtr

from stalefront.analysis.fits.base import Constant, Fit, Interval, decided, input_hash
from stalefront.analysis.fits.eta_max import RULES, Bracket, brackets

# Assumed floor of the cell noise σ in log units: below it a perfect fit has likelihood 1 and σ is not identified.
SIGMA_MIN = 0.02
# Cited: a log-likelihood this close to 0 is a perfect fit, where only sets are identified.
DEGENERATE_LL = -1e-3


@dataclass(frozen=True)
class Units:
    """Brackets as arrays of shape (U,): S, and the ends of η_max (0 and inf where open)."""

    S: np.ndarray[Any, np.dtype[np.float64]]
    lo: np.ndarray[Any, np.dtype[np.float64]]
    hi: np.ndarray[Any, np.dtype[np.float64]]


def units_of(found: list[Bracket], rule: str) -> Units:
    """Arrays of one bracketing rule (``conservative`` or ``optimistic``)."""
    ends = [getattr(b, rule) for b in found]
    return Units(
        np.array([b.S for b in found], dtype=np.float64),
        np.array([e[0] for e in ends], dtype=np.float64),
        np.array([e[1] for e in ends], dtype=np.float64),
    )


def common_constant(units: Units) -> tuple[float, float] | None:
    """Intersection of the intervals S·[L, U): (lo, hi), or None if they have nothing in common."""
    lo, hi = float(np.max(units.S * units.lo)), float(np.min(units.S * units.hi))
    # Ends that differ by rounding only, as products of a grid in powers of two do, touch and have nothing in common.
    return (lo, hi) if lo < hi * (1 - 1e-9) else None


def slope_set(units: Units) -> tuple[float, float] | None:
    """Every slope s for which some a satisfies log L ≤ a + s·log S ≤ log U at all units.

    Two linear programmes over (a, s), minimise and maximise s. Ends may be ±inf; None if no line fits.
    """
    x = np.log(units.S)
    low, high = units.lo > 0, np.isfinite(units.hi)
    a_ub = np.concatenate(
        [
            np.column_stack([-np.ones(low.sum()), -x[low]]),
            np.column_stack([np.ones(high.sum()), x[high]]),
        ]
    )
    b_ub = np.concatenate([-np.log(units.lo[low]), np.log(units.hi[high])])
    if not len(b_ub):
        return -math.inf, math.inf
    ends = []
    for sign in (1.0, -1.0):
        found = optimize.linprog([0.0, sign], A_ub=a_ub, b_ub=b_ub, bounds=[(None, None), (None, None)])
        if found.status == 2:
            return None
        ends.append(-sign * math.inf if found.x is None or found.status != 0 else float(found.x[1]))
    return ends[0], ends[1]


def interval_normal_ll(units: Units, slope: float | None) -> float:
    """Largest Σ log[Φ((log U − μ)/σ) − Φ((log L − μ)/σ)], μ = a + s·log S, over a, σ ≥ σ_min, and s unless fixed.

    With γ = 1/σ, α = a/σ, β = s/σ the arguments γ·log U − α − β·log S are linear and every term is concave in
    (α, β, γ), so that one ascent (L-BFGS-B, exact gradient) finds the maximum. 0 is a perfect fit: σ is then not
    identified and ends at its floor.
    """
    x = np.log(units.S) - float(np.mean(np.log(units.S)))
    with np.errstate(divide="ignore"):
        ends = np.log(np.array([units.lo, units.hi]))
    known = np.isfinite(ends)
    if not known.any():
        return 0.0
    perfect = _perfect_ll(units, x, ends, slope)
    if perfect > DEGENERATE_LL:
        return perfect
    # Derivatives of z = γ·end − α − β·x by (α, γ, β); a fixed slope is moved into the ends, where β = s·γ.
    shifted = ends if slope is None else ends - slope * x
    origin = float(shifted[known].mean())
    columns = [-np.ones_like(ends), np.where(known, shifted - origin, 0.0)]
    if slope is None:
        columns.append(np.broadcast_to(-x, ends.shape))
    design = np.stack(columns, axis=-1)
    open_ends = np.where(known, 0.0, ends)

    def loss(theta: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        z = design @ theta + open_ends
        log_p = _log_between(z[0], z[1])
        log_density = -0.5 * (np.where(known, z, 0.0) ** 2 + math.log(2 * math.pi)) - log_p
        density = np.where(known, np.exp(np.minimum(log_density, 700.0)), 0.0)
        gradient = (density[1][:, None] * design[1] - density[0][:, None] * design[0]).sum(axis=0)
        return -float(log_p.sum()), -gradient

    start = [0.0, 1.0] + ([0.0] if slope is None else [])
    bounds = [(None, None), (1e-6, 1 / SIGMA_MIN)] + ([(None, None)] if slope is None else [])
    options = {"ftol": 1e-12, "gtol": 1e-8, "maxiter": 400}
    # The stubs know no objective that returns its gradient together with bounds.
    found: Any = optimize.minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B", options=options)  # type: ignore[call-overload]
    return min(0.0, -float(found.fun))


def _perfect_ll(units: Units, x: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], slope: float | None) -> float:
    """Log-likelihood, at the noise floor, of a line through the middle of all brackets; −inf if there is none."""
    if slope is None:
        found = slope_set(units)
        if found is None or not np.isfinite(found).any():
            return -math.inf
        # A slope inside the set; one unit inside where it is unbounded on one side.
        lo, hi = found
        slope = (lo + hi) / 2 if math.isfinite(lo) and math.isfinite(hi) else (lo + 1 if math.isfinite(lo) else hi - 1)
    low, high = float((ends[0] - slope * x).max()), float((ends[1] - slope * x).min())
    if low >= high:
        return -math.inf
    middle = (low + high) / 2 if math.isfinite(low + high) else (low + 1 if math.isfinite(low) else high - 1)
    z = (ends - slope * x - middle) / SIGMA_MIN
    return float(_log_between(z[0], z[1]).sum())


def _log_between(lo: np.ndarray[Any, Any], hi: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """log(Φ(hi) − Φ(lo)), taken in the tail where the difference does not cancel."""
    flip = lo > 0
    upper, lower = np.where(flip, -lo, hi), np.where(flip, -hi, lo)
    log_upper, log_lower = log_ndtr(upper), log_ndtr(lower)
    return np.asarray(log_upper + np.log(-np.expm1(np.minimum(log_lower - log_upper, -1e-16))))


def fit_s_eta(frame: pd.DataFrame, *, definition: str, arm: str) -> Fit:
    """S·η_max per S, what is common to all S, and the slopes the brackets admit.

    Parameters
    ----------
    frame : DataFrame
        Outcome frame (``fits.base``).
    definition, arm : str
        Labels carried into the fit.

    Returns
    -------
    Fit
        Constants ``S_eta_max_<rule>`` (common interval, None if there is none) and ``slope_<rule>`` (set) under both
        bracketing rules of ``eta_max``, from the brackets with seeds pooled; ``slope_<rule>[seed=…]`` for each seed.
        ``tests`` holds the interval-normal log-likelihoods of flat, 1/S and free slope over (S, seed) units.
    """
    pooled, single = brackets(frame)
    constants: dict[str, Constant] = {}
    tests: dict[str, float | None] = {}
    notes: list[str] = []
    for rule in RULES if pooled else ():
        units = units_of(pooled, rule)
        constants[f"S_eta_max_{rule}"] = _product_constant(units, rule, notes)
        constants[f"slope_{rule}"] = _slope_constant(units, rule, notes)
        for seed in _seeds(single):
            mine = units_of([b for b in single if b.seed == seed], rule)
            constants[f"slope_{rule}[seed={seed}]"] = _slope_constant(mine, f"{rule}, seed {seed}", notes)
        tests.update(_tests(units_of(single, rule), rule, notes))
    known = decided(frame)
    return Fit(
        name="s_eta",
        definition=definition,
        arm=arm,
        constants=constants,
        n=len(pooled),
        n_events=sum(b.censoring == "interval" for b in pooled),
        n_left=sum(b.censoring == "left" for b in pooled),
        n_right=sum(b.censoring == "right" for b in pooled),
        n_undecided=len(frame) - len(known),
        method="interval arithmetic and linear programmes on the η_max brackets; interval-normal likelihoods",
        settings={"sigma_min": SIGMA_MIN, "degenerate_ll": DEGENERATE_LL},
        input_hash=input_hash(frame),
        rows=[_product_row(b) for b in pooled],
        tests=tests,
        notes=notes,
    )


def _seeds(single: list[Bracket]) -> list[Any]:
    seeds = sorted({b.seed for b in single}, key=str)
    return seeds if len(seeds) > 1 else []


def _product_row(b: Bracket) -> dict[str, Any]:
    row: dict[str, Any] = {"S": b.S, "n_seeds": b.n_seeds}
    for rule in RULES:
        lo, hi = getattr(b, rule)
        row[f"{rule}_lo"] = b.S * lo if lo > 0 else None
        row[f"{rule}_hi"] = b.S * hi if math.isfinite(hi) else None
    return row


def _open(lo: float, hi: float, kind: str) -> Interval:
    return Interval(lo if math.isfinite(lo) and lo != 0 else None, hi if math.isfinite(hi) else None, kind)


def _product_constant(units: Units, rule: str, notes: list[str]) -> Constant:
    meaning = f"S·η_max common to every S ({rule} brackets)"
    common = common_constant(units)
    if common is None:
        notes.append(f"no value of S·η_max is common to every S under {rule} bracketing")
        return Constant(None, None, "learning rate", meaning)
    return Constant(None, _open(*common, "bracket"), "learning rate", meaning)


def _slope_constant(units: Units, rule: str, notes: list[str]) -> Constant:
    meaning = f"d log η_max / d log S ({rule} brackets)"
    if len(set(units.S)) < 2:
        notes.append(f"a slope needs two values of S ({rule})")
        return Constant(None, None, "1", meaning)
    slopes = slope_set(units)
    if slopes is None:
        notes.append(f"no straight line in log S passes through every bracket ({rule})")
        return Constant(None, None, "1", meaning)
    lo, hi = (None if math.isinf(v) else v + 0.0 for v in slopes)
    return Constant(None, Interval(lo, hi, "set"), "1", meaning)


def _tests(units: Units, rule: str, notes: list[str]) -> dict[str, float | None]:
    """Log-likelihoods of flat, 1/S and free slope, and the likelihood-ratio p-values where they mean something."""
    if len(set(units.S)) < 2:
        return {}
    ll = {k: interval_normal_ll(units, s) for k, s in (("flat", 0.0), ("one_over_S", -1.0), ("free", None))}
    out: dict[str, float | None] = {f"ll_{k}_{rule}": v for k, v in ll.items()}
    # n ≤ k + 1 units, or a perfect fit, leave nothing to test against (three parameters: a, s, σ).
    usable = len(units.S) > 4 and ll["free"] < DEGENERATE_LL
    if not usable:
        notes.append(
            f"likelihood-ratio p-values of the slope are not given for {len(units.S)} (S, seed) units ({rule}): "
            + ("too few" if len(units.S) <= 4 else "a perfect fit identifies no noise; see the slope set")
        )
    for k in ("flat", "one_over_S"):
        ratio = max(0.0, 2 * (ll["free"] - ll[k]))
        out[f"p_{k}_{rule}"] = float(stats.chi2.sf(ratio, 1)) if usable else None
    return out
