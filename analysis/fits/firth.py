"""The 50 % contour of collapse over (S, η): Firth-penalised logistic regression with profile intervals.

Notation: logit p = β₀ + β_S·log(S/S₀) + β_η·log(η/η₀) (natural logs, centred at S₀, η₀);
η50(S) = η₀·exp(−(β₀ + β_S·log(S/S₀))/β_η); slope d log η50/d log S = −β_S/β_η. The 1/S law is slope −1
(β_S = β_η), a flat frontier is slope 0 (β_S = 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize, stats

from stalefront.analysis.fits.base import Constant, Fit, Interval, decided, input_hash
from stalefront.analysis.fits.logit import Array, Maximum, maximise, profile_ratio

# A coefficient of log η below this is no effect: the contour would lie e¹⁰⁰⁰⁰⁰⁰ away or further.
NO_EFFECT = 1e-6

METHOD = (
    "Firth-penalised logistic regression of collapse on log S and log η; penalised profile likelihood intervals and "
    "likelihood-ratio tests that keep the full design in the Jeffreys term; cells count as independent, also those "
    "that share a seed"
)


@dataclass(frozen=True)
class Grouped:
    """Outcomes grouped by distinct (S, η), C of them: x = log(S/S₀), y = log(η/η₀), trials m, collapses k."""

    S: Array
    lr: Array
    x: Array
    y: Array
    m: Array
    k: Array
    S0: float
    lr0: float


def group(known: pd.DataFrame, centre: tuple[float, float] | None = None) -> Grouped:
    """Group decided outcomes and centre the covariates, by default at the mean logs of the rows."""
    table = known.groupby(["S", "lr"], sort=True)["collapsed"].agg(["size", "sum"]).reset_index()
    s, lr = table["S"].to_numpy(dtype=np.float64), table["lr"].to_numpy(dtype=np.float64)
    m, k = table["size"].to_numpy(dtype=np.float64), table["sum"].to_numpy(dtype=np.float64)
    if centre is None:
        centre = (float(np.exp(np.average(np.log(s), weights=m))), float(np.exp(np.average(np.log(lr), weights=m))))
    return Grouped(s, lr, np.log(s / centre[0]), np.log(lr / centre[1]), m, k, *centre)


def separated(g: Grouped) -> bool:
    """Whether a line in (log S, log η) splits collapses from survivals, so that plain maximum likelihood diverges."""
    X = np.column_stack([np.ones_like(g.x), g.x, g.y])
    bad, good = g.k > 0, g.k < g.m
    a_ub = np.concatenate([-X[bad], X[good]])
    found = optimize.linprog(np.zeros(3), A_ub=a_ub, b_ub=-np.ones(len(a_ub)), bounds=[(None, None)] * 3)
    return bool(found.status == 0)


def fit_firth(
    frame: pd.DataFrame,
    *,
    definition: str,
    arm: str,
    level: float = 0.95,
    centre: tuple[float, float] | None = None,
) -> Fit:
    """Fit the collapse probability surface of one arm.

    Parameters
    ----------
    frame : DataFrame
        Outcome frame (``fits.base``).
    definition, arm : str
        Labels carried into the fit.
    level : float
        Confidence of the profile intervals.
    centre : (S₀, η₀), optional
        Centre of the covariates; the means of the logs by default. It moves β₀ only.

    Returns
    -------
    Fit
        ``slope``, ``S_eta50`` (under the 1/S restriction) and ``eta50[S=…]``, with profile intervals whose unbounded
        ends are None; ``beta`` in ``rows``; penalised log-likelihoods, ratios and p-values in ``tests``. Without two
        S, two η and both outcomes there are no constants and ``notes`` says why.
    """
    known = decided(frame)
    n_bad = int(known["collapsed"].sum())
    missing = _missing(known, n_bad)
    if missing is not None:
        return _fit(frame, known, definition, arm, level, notes=[missing])
    g = group(known, centre)
    X = np.column_stack([np.ones_like(g.x), g.x, g.y])
    full = maximise(X, g.m, g.k, np.eye(3))
    notes = ["a line separates the outcomes: plain maximum likelihood would diverge"] if separated(g) else []
    if not full.converged:
        notes.append("Newton's method did not converge; read the numbers with care")
    if full.beta[2] <= NO_EFFECT:
        notes.append("collapse does not become likelier with the learning rate here; no contour is given")
        return _fit(frame, known, definition, arm, level, notes=notes, rows=[_beta_row(full, g)])
    # Coordinates (1, log S, log Sη): the 1/S law drops the second column, with the same determinant.
    design = np.column_stack([np.ones_like(g.x), g.x, g.x + g.y])
    product = maximise(design, g.m, g.k, np.eye(3)[:, [0, 2]])
    flat = maximise(X, g.m, g.k, np.eye(3)[:, [0, 2]])
    constants = {
        "slope": _slope(X, g, full, level),
        "S_eta50": _product(design, g, product, level),
        **{f"eta50[S={s:g}]": eta50_at(g, full, s, level) for s in sorted(set(g.S))},
    }
    tests = _tests(full, product, flat)
    return _fit(
        frame, known, definition, arm, level, constants=constants, notes=notes, tests=tests, rows=[_beta_row(full, g)]
    )


def contour(fit: Fit, S: Array) -> Array | None:
    """η50 at the given S, shape of ``S``, from a fit's coefficients; None if the fit has no contour."""
    if "slope" not in fit.constants or not fit.rows:
        return None
    b = fit.rows[0]
    log_eta = math.log(b["lr0"]) - (b["beta_const"] + b["beta_log_S"] * np.log(S / b["S0"])) / b["beta_log_lr"]
    return np.asarray(np.exp(log_eta))


def _missing(known: pd.DataFrame, n_bad: int) -> str | None:
    if not len(known):
        return "no decided cell yet"
    if n_bad in (0, len(known)):
        which = "no cell" if n_bad == 0 else "every cell"
        return f"{which} of {len(known)} collapsed: the contour lies outside the grid"
    if known["S"].nunique() < 2:
        return "the surface needs at least two values of S"
    if known["lr"].nunique() < 2:
        return "the surface needs at least two learning rates"
    if len(known[["S", "lr"]].drop_duplicates()) < 3 or _collinear(known):
        return "log S and log η are collinear over the decided cells: their effects cannot be told apart"
    return None


def _collinear(known: pd.DataFrame) -> bool:
    X = np.column_stack([np.ones(len(known)), np.log(known["S"]), np.log(known["lr"])])
    return int(np.linalg.matrix_rank(X)) < 3


def _interval(lo: float, hi: float, level: float) -> Interval:
    return Interval(lo if math.isfinite(lo) else None, hi if math.isfinite(hi) else None, "profile", level)


def _slope(X: Array, g: Grouped, full: Maximum, level: float) -> Constant:
    value = float(-full.beta[1] / full.beta[2])
    found = profile_ratio(X, g.m, g.k, num=1, den=2, free=(0,), estimate=value, best=full.ll, scale=1.0, level=level)
    return Constant(value, _interval(found.lo, found.hi, level), "1", "d log η50 / d log S")


def _product(X: Array, g: Grouped, product: Maximum, level: float) -> Constant:
    """S·η50 where the slope is held at −1."""
    meaning = "S·η at which half the runs collapse, slope held at −1"
    if product.beta[2] <= NO_EFFECT:
        return Constant(None, None, "learning rate", meaning)
    return _exp_ratio(X, g, product, free=(), reference=g.S0 * g.lr0, level=level, meaning=meaning)


def eta50_at(g: Grouped, full: Maximum, s: float, level: float) -> Constant:
    """η50 at one S, on the grid or between its values: the ratio −β₀/β_η with log S centred there."""
    shift = math.log(s / g.S0)
    X = np.column_stack([np.ones_like(g.x), g.x - shift, g.y])
    moved = Maximum(full.beta + np.array([full.beta[1] * shift, 0.0, 0.0]), full.ll, full.converged)
    meaning = f"learning rate at which half the runs collapse at S={s:g}"
    return _exp_ratio(X, g, moved, free=(1,), reference=g.lr0, level=level, meaning=meaning)


def _exp_ratio(
    X: Array, g: Grouped, at: Maximum, *, free: tuple[int, ...], reference: float, level: float, meaning: str
) -> Constant:
    """reference·exp(−β₀/β_η) with its profile interval; the product model has β_Sη in the place of β_η."""
    log_ratio = float(-at.beta[0] / at.beta[2])
    # The interval is some cell widths 1/β_η wide: a scale that makes tan φ move evenly over it.
    found = profile_ratio(
        X,
        g.m,
        g.k,
        num=0,
        den=2,
        free=free,
        estimate=log_ratio,
        best=at.ll,
        scale=max(1.0, 1.0 / float(at.beta[2])),
        level=level,
    )
    value, lo, hi = (_exp(reference, v) for v in (log_ratio, found.lo, found.hi))
    if not 0 < value < math.inf:
        return Constant(None, None, "learning rate", meaning)
    return Constant(value, _interval(lo, hi, level), "learning rate", meaning)


def _exp(reference: float, log_ratio: float) -> float:
    """reference·exp(log_ratio); ±inf (unbounded) where that is not a float64 any more."""
    return reference * math.exp(log_ratio) if abs(log_ratio) < 600 else math.copysign(math.inf, log_ratio)


def _tests(full: Maximum, product: Maximum, flat: Maximum) -> dict[str, float | None]:
    """Penalised likelihood ratios of the two named slopes against a free one, one degree of freedom each."""
    out: dict[str, float | None] = {"pll_full": full.ll, "pll_one_over_S": product.ll, "pll_flat": flat.ll}
    for name, restricted in (("one_over_S", product), ("flat", flat)):
        ratio = 2 * (full.ll - restricted.ll)
        out[f"lr_{name}"] = ratio
        out[f"p_{name}"] = float(stats.chi2.sf(max(ratio, 0.0), 1))
    return out


def _beta_row(full: Maximum, g: Grouped) -> dict[str, Any]:
    names = ("beta_const", "beta_log_S", "beta_log_lr")
    return {**dict(zip(names, map(float, full.beta), strict=True)), "S0": g.S0, "lr0": g.lr0}


def _fit(
    frame: pd.DataFrame,
    known: pd.DataFrame,
    definition: str,
    arm: str,
    level: float,
    *,
    constants: dict[str, Constant] | None = None,
    rows: list[dict[str, Any]] | None = None,
    tests: dict[str, float | None] | None = None,
    notes: list[str],
) -> Fit:
    n_bad = int(known["collapsed"].sum())
    return Fit(
        name="firth",
        definition=definition,
        arm=arm,
        constants=constants or {},
        n=len(known),
        n_events=n_bad,
        n_left=0,
        n_right=len(known) - n_bad,
        n_undecided=len(frame) - len(known),
        method=METHOD,
        settings={"level": level},
        input_hash=input_hash(frame),
        rows=rows or [],
        tests=tests or {},
        notes=notes,
    )
