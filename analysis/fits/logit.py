"""Firth's penalised logistic likelihood for grouped binary outcomes, maximised on linear subspaces.

Notation:

========  ==========================================================================================
``X``     design, shape (C, K): one row a distinct cell, always the *full* design
``m``     trials per row, shape (C,)
``k``     collapses per row, shape (C,)
``p``     1/(1 + exp(−Xβ)), shape (C,)
``W``     diag(m·p·(1 − p))
``h``     diagonal of W^½ X (XᵀWX)⁻¹ Xᵀ W^½, shape (C,)
``R``     basis of the subspace, shape (K, J): β = Rγ
========  ==========================================================================================

Penalised log-likelihood ℓ*(β) = Σ [k log p + (m − k) log(1 − p)] + ½ log|XᵀWX| with gradient
U*(β) = Xᵀ(k − m·p + h(½ − p)) (Firth, Biometrika 80 (1993); Heinze & Schemper, Stat. Med. 21 (2002)). On a subspace
the gradient is RᵀU*, and the Jeffreys term keeps all K columns: dropping columns would compare penalties of different
dimension and can make a likelihood ratio negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, stats
from scipy.special import expit

from stalefront.analysis.verdicts.base import BoolArray, FloatArray

Array = FloatArray

# Linear predictors beyond this have p indistinguishable from 0 or 1 in float64 products; they are held there.
ETA_MAX = 30.0
MAX_ITERATIONS = 200


@dataclass(frozen=True)
class Maximum:
    """A maximum of the penalised likelihood: β (shape (K,)), its value, and whether Newton's steps converged."""

    beta: Array
    ll: float
    converged: bool


def penalised(X: Array, m: Array, k: Array, beta: Array) -> tuple[float, Array, Array]:
    """ℓ*(β), its gradient U* (shape (K,)) and the information XᵀWX (shape (K, K))."""
    eta = np.clip(X @ beta, -ETA_MAX, ETA_MAX)
    p = expit(eta)
    w = m * p * (1 - p)
    information = X.T @ (w[:, None] * X)
    sign, logdet = np.linalg.slogdet(information)
    if sign <= 0:
        return -math.inf, np.zeros(X.shape[1]), information
    h = w * np.einsum("ci,ci->c", X @ np.linalg.inv(information), X)
    ll = float(np.sum(k * -np.logaddexp(0, -eta) + (m - k) * -np.logaddexp(0, eta)) + 0.5 * logdet)
    return ll, X.T @ (k - m * p + h * (0.5 - p)), information


def maximise(
    X: Array, m: Array, k: Array, basis: Array, start: Array | None = None, tolerance: float = 1e-7
) -> Maximum:
    """Maximise ℓ* over β = Rγ by Fisher scoring with step halving.

    Parameters
    ----------
    X, m, k : float arrays, shapes (C, K), (C,), (C,)
    basis : float array, shape (K, J)
        R, the basis of the subspace.
    start : float array, shape (J,), optional
        First γ; zero by default.
    tolerance : float
        Largest change of a linear predictor in the last step; the likelihood is right to its square.
    """
    gamma = np.zeros(basis.shape[1]) if start is None else start.copy()
    ll, score, information = penalised(X, m, k, basis @ gamma)
    along = X @ basis
    for _ in range(MAX_ITERATIONS):
        gradient = basis.T @ score
        step = np.linalg.lstsq(basis.T @ information @ basis, gradient, rcond=None)[0]
        # A step of 5 in a linear predictor saturates p; longer ones only overshoot.
        step *= min(1.0, 5.0 / max(float(np.max(np.abs(along @ step))), 1e-300))
        gained = False
        for _ in range(40):
            new = penalised(X, m, k, basis @ (gamma + step))
            if new[0] >= ll:
                gained = True
                break
            step = step / 2
        if not gained:
            return Maximum(basis @ gamma, ll, bool(np.max(np.abs(gradient)) < 1e-4))
        done = float(np.max(np.abs(along @ step))) < tolerance
        gamma = gamma + step
        ll, score, information = new
        if done:
            return Maximum(basis @ gamma, ll, True)
    return Maximum(basis @ gamma, ll, False)


def maximise_many(X: Array, m: Array, k: Array, tolerance: float = 1e-5) -> tuple[Array, BoolArray]:
    """Maximise ℓ* of D data sets on one design, all at once.

    Parameters
    ----------
    X : float array, shape (C, K)
    m, k : float arrays, shape (D, C)
        Trials and collapses of every data set; a row of X without trials has no weight.
    tolerance : float
        Largest change of a linear predictor in the last step.

    Returns
    -------
    beta, converged : arrays, shapes (D, K) and (D,)
        A data set whose trials leave the design singular does not converge.
    """
    beta = np.zeros((len(m), X.shape[1]))
    ll, score, information = _penalised_many(X, m, k, beta)
    usable = np.isfinite(ll)
    done = ~usable
    for _ in range(MAX_ITERATIONS):
        if done.all():
            break
        step = np.zeros_like(beta)
        step[~done] = np.linalg.solve(information[~done], score[~done][:, :, None])[:, :, 0]
        step *= np.minimum(1.0, 5.0 / np.maximum(np.abs(step @ X.T).max(axis=1), 1e-300))[:, None]
        for _ in range(40):
            new = _penalised_many(X, m, k, beta + step)
            worse = ~(new[0] >= ll) & ~done
            if not worse.any():
                break
            step[worse] /= 2
        step[worse] = 0.0
        beta = beta + step
        done = done | (np.abs(step @ X.T).max(axis=1) < tolerance)
        ll, score, information = _penalised_many(X, m, k, beta)
    return beta, usable & done


def _penalised_many(X: Array, m: Array, k: Array, beta: Array) -> tuple[Array, Array, Array]:
    """:func:`penalised` of D data sets: shapes (D,), (D, K), (D, K, K)."""
    eta = np.clip(beta @ X.T, -ETA_MAX, ETA_MAX)
    p = expit(eta)
    w = m * p * (1 - p)
    information = np.einsum("dc,ci,cj->dij", w, X, X)
    sign, logdet = np.linalg.slogdet(information)
    regular = (sign > 0) & np.isfinite(logdet) & (np.linalg.cond(information) < 1 / np.finfo(float).eps)
    safe = np.where(regular[:, None, None], information, np.eye(X.shape[1]))
    h = w * np.einsum("ci,dij,cj->dc", X, np.linalg.inv(safe), X)
    data = np.sum(k * -np.logaddexp(0, -eta) + (m - k) * -np.logaddexp(0, eta), axis=1)
    ll = np.where(regular, data + 0.5 * np.where(regular, logdet, 0.0), -np.inf)
    return ll, (k - m * p + h * (0.5 - p)) @ X, safe


@dataclass(frozen=True)
class RatioProfile:
    """Profile interval of τ = −β[num]/β[den] with β[den] ≥ 0; an end is ±inf where the profile never leaves the level.

    Lines of the (β[num], β[den]) half-plane are walked by the angle φ ∈ [−π/2, π/2] with τ = scale·tan φ, whose ends
    are the models with β[den] = 0: a profile that is still above the level there has no bound on that side.
    """

    lo: float
    hi: float


def profile_ratio(
    X: Array,
    m: Array,
    k: Array,
    *,
    num: int,
    den: int,
    free: tuple[int, ...],
    estimate: float,
    best: float,
    scale: float,
    level: float,
) -> RatioProfile:
    """Penalised-profile interval of τ = −β[num]/β[den].

    Parameters
    ----------
    num, den : int
        Coordinates of the ratio.
    free : tuple of int
        Coordinates maximised over; the remaining ones are 0.
    estimate, best : float
        τ at the maximum and ℓ* there.
    scale : float
        Size of τ that tan φ = 1 stands for; of the order of the expected interval.
    level : float
        Confidence; the drop allowed is χ²₁(level)/2.
    """
    drop = float(stats.chi2.ppf(level, 1)) / 2
    n_coordinates = X.shape[1]

    # Neighbouring φ have neighbouring maxima, so each search starts where the one before ended.
    last = np.zeros(len(free) + 1)

    def deficit(phi: float) -> float:
        direction = np.zeros((n_coordinates, 1))
        direction[num, 0], direction[den, 0] = -scale * math.sin(phi), math.cos(phi)
        basis = np.column_stack([np.eye(n_coordinates)[:, list(free)], direction])
        found = maximise(X, m, k, basis, start=last, tolerance=1e-4)
        last[:-1] = found.beta[list(free)]
        last[-1] = float(direction[:, 0] @ found.beta) / float(direction[:, 0] @ direction[:, 0])
        if last[-1] < 0:
            # β[den] < 0 would say that a larger learning rate is safer; the half-plane ends at 0.
            last[-1] = 0.0
            found = maximise(X, m, k, basis[:, :-1], start=last[:-1], tolerance=1e-4) if free else _origin(X, m, k)
        return best - found.ll - drop

    phi_hat = math.atan(estimate / scale)
    ends = [_crossing(deficit, phi_hat, sign * math.pi / 2) for sign in (-1, 1)]
    lo, hi = (None if e is None else scale * math.tan(e) for e in ends)
    return RatioProfile(-math.inf if lo is None else lo, math.inf if hi is None else hi)


def _origin(X: Array, m: Array, k: Array) -> Maximum:
    beta = np.zeros(X.shape[1])
    return Maximum(beta, penalised(X, m, k, beta)[0], True)


def _crossing(deficit: Callable[[float], float], start: float, end: float) -> float | None:
    """φ between start and end at which the deficit turns positive; None if it never does.

    Where ℓ* is concave, the points above a level form a convex set and the lines that meet it an interval of φ: the
    deficit changes sign at most once on the way, and only if it is positive at the end.
    """
    if deficit(end) <= 0:
        return None
    root: Any = optimize.brentq(deficit, start, end, xtol=1e-6)
    return float(root)
