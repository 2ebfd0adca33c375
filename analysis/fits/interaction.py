"""Does a setting cost the frontier the same factor at every S? Losses of its levels, and whether they depend on S.

Notation (M + 1 levels of one setting, level 0 the reference):

==========  ==============================================================================================
``x, y``    log(S/S₀), log(η/η₀); natural logs, centred at the mean logs of the cells
``1[m]``    1 in the cells of level m, m = 1 … M
``z_m``     score of a level with a size: 0 for size 0, else 1 + log₁₀(size/smallest size above 0)
``loss``    log₁₀ η50(level 0) − log₁₀ η50(level m), in dex: positive if the level survives smaller rates only
==========  ==============================================================================================

logit p = β₀ + β_η y + Σ_m α_m 1[m] + β_S x + Σ_m γ_m x 1[m], so that loss_m(S) = (α_m + γ_m x)/(β_η ln 10).
*Additive in log η* is γ = 0: the loss α_m/(β_η ln 10) is the same factor at every S.

Two tests of it, each a penalised likelihood ratio that keeps its own full design in the penalty (``fits.logit``): all
γ_m at once (M degrees of freedom; it rejects too seldom where cells are few), and for levels with sizes the trend
γ_m = γ z_m (one degree, near its nominal level). The trend decides where there are sizes. A test that finds nothing
does not show that the loss is additive: that is said only if, besides, each change of the loss between the smallest
and the largest S lies within ``MARGIN_DEX`` with its whole interval.

Sources: Firth, Biometrika 80 (1993); Heinze and Schemper, Stat. Med. 21 (2002); two intervals combined as in
``fits.push``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from stalefront.analysis.fits.base import Constant, Fit, Interval, decided, input_hash
from stalefront.analysis.fits.levels import Level, Model, design, fit_model, group_levels, ratio_dex, scores
from stalefront.analysis.fits.logit import Array, maximise
from stalefront.analysis.fits.push import Located, Span, difference, locate
from stalefront.analysis.fits.seeds import BOOTSTRAP_SEED, MAX_ENUMERATED, Draws

# Assumed: a loss that changes by less than a factor of two over the S of the grid is the same for a reader.
MARGIN_DEX = math.log10(2)
ADDITIVE, GROWS, SHRINKS, CHANGES, OPEN = "additive", "grows", "shrinks", "changes", "cannot be told"
METHOD = (
    "Firth-penalised logistic regression of collapse on log S, log η and the levels; penalised likelihood ratios with "
    "the full design in the Jeffreys term; intervals are the outer of profile likelihood and (from three seeds on) a "
    "bootstrap over seeds; in tests and profiles cells count as independent, also those that share a seed"
)

Frames = Sequence[tuple[Level, pd.DataFrame]]


def fit_interaction(
    frames: Frames, *, axis: str, definition: str, arm: str, level: float = 0.95, draws: Draws | None = None
) -> Fit:
    """Fit the loss of every level against the first one, and test whether it depends on S.

    Parameters
    ----------
    frames : sequence of (Level, DataFrame)
        Outcome frames (``fits.base``), the reference first.
    axis : str
        Name of the setting, e.g. ``mismatch.target_kl``.
    definition, arm : str
        Labels carried into the fit; the arm is what all levels share.
    level : float
        Confidence of the intervals, and 1 − size of the tests.
    draws : Draws, optional
        Resamples of the seeds of all levels.

    Returns
    -------
    Fit
        ``loss_dex[<level>]`` of the additive model; ``change_dex[<level>]`` of the full one, the loss at the largest S
        less that at the smallest; ``trend_dex``, the same for each unit of z. ``rows`` hold η50 and the loss at each
        (level, S), every level fitted by itself, and at the end the verdict. A level whose runs all ended alike has a
        bound in place of a loss and stays out of the tests.
    """
    levels = [v for v, _ in frames]
    known = [decided(frame) for _, frame in frames]
    rows = _local_rows(frames, definition, level, draws)
    constants: dict[str, Constant] = {}
    tests: dict[str, float | None] = {}
    last: dict[str, Any] = {"level": None, "verdict": OPEN, "decided_by": None, "beta": None}
    problem = _problem(levels, known)
    notes = [] if problem is None else [problem]
    if problem is None:
        cells = group_levels(known)
        additive = fit_model(cells, design(cells, len(levels)), draws)
        notes += _remarks(additive)
        if additive.rises:
            last["beta"] = _beta(additive, levels)
            constants |= _losses(additive, levels, known, level)
            changes, tests, more = _dependence(known, levels, level, draws)
            constants, notes = constants | changes, notes + more
            last |= _verdict(constants, tests, level)
    return Fit(
        name="interaction",
        definition=definition,
        arm=arm,
        constants=constants,
        n=sum(map(len, known)),
        n_events=sum(int(k["collapsed"].sum()) for k in known),
        n_left=sum(r["eta50"]["censoring"] == "left" for r in rows),
        n_right=sum(r["eta50"]["censoring"] == "right" for r in rows),
        n_undecided=sum(len(frame) for _, frame in frames) - sum(map(len, known)),
        method=METHOD,
        settings=_settings(axis, levels, level, draws),
        input_hash=_hash(frames),
        rows=[*rows, last],
        tests=tests,
        notes=notes,
    )


def additive_eta50(fit: Fit, label: str, S: Array) -> Array | None:
    """η50 of the additive model at a level and the given S, shape of ``S``; None if there is no such model."""
    b = fit.rows[-1]["beta"]
    if b is None:
        return None
    predictor = b["const"] + b["alpha"][label] + b["log_S"] * np.log(S / b["S0"])
    return np.asarray(b["lr0"] * np.exp(-predictor / b["log_lr"]))


def _problem(levels: Sequence[Level], known: Sequence[pd.DataFrame]) -> str | None:
    """Why there is nothing to fit, or None."""
    empty = [v.label for v, rows in zip(levels, known, strict=True) if not len(rows)]
    if empty:
        return f"no decided cell at {', '.join(empty)}"
    if len(levels) < 2:
        return "a single level: nothing to hold it against"
    n, bad = sum(map(len, known)), sum(int(k["collapsed"].sum()) for k in known)
    if bad in (0, n):
        return f"{'no' if bad == 0 else 'every'} cell of {n} collapsed: the frontier is outside the grid at every level"
    X = design(group_levels(known), len(levels))
    if np.linalg.matrix_rank(X) < X.shape[1]:
        return "levels, log S and log η are collinear over the decided cells: their effects cannot be told apart"
    return None


def _remarks(model: Model) -> list[str]:
    notes = []
    if model.separated:
        notes.append("the additive model separates the outcomes: plain maximum likelihood would diverge")
    if not model.at.converged:
        notes.append("Newton's method did not converge; read the numbers with care")
    if not model.rises:
        notes.append("collapse does not become likelier with the learning rate here; no loss is given")
    return notes


def _beta(model: Model, levels: Sequence[Level]) -> dict[str, Any]:
    b, n = [float(v) for v in model.at.beta], len(levels)
    alpha = dict(zip([v.label for v in levels], [0.0, *b[2 : 1 + n]], strict=True))
    slope = b[1 + n] if len(b) > 1 + n else 0.0
    return {
        **{"const": b[0], "log_lr": b[1], "log_S": slope, "alpha": alpha},
        **{"S0": model.cells.S0, "lr0": model.cells.lr0},
    }


def _losses(model: Model, levels: Sequence[Level], known: Sequence[pd.DataFrame], level: float) -> dict[str, Constant]:
    """Loss of every level in the additive model; a bound where all runs of a level, or of the reference, end alike.

    The penalty would close such an interval from outside the grid: the side on which nothing was seen stays open.
    """
    out = {}
    none = [not k["collapsed"].any() for k in known]
    every = [bool(k["collapsed"].all()) for k in known]
    for i, v in enumerate(levels[1:], start=1):
        meaning = f"log₁₀ of η50 at {levels[0].label} over η50 at {v.label}, the same at every S"
        found = ratio_dex(model, 1 + i, level, 1.0, meaning)
        assert found.interval is not None
        open_lo, open_hi = none[i] or every[0], every[i] or none[0]
        if open_lo or open_hi:
            lo, hi = None if open_lo else found.interval.lo, None if open_hi else found.interval.hi
            found = Constant(None, Interval(lo, hi, found.interval.kind, level), "dex", meaning)
        out[f"loss_dex[{v.label}]"] = found
    return out


def _dependence(
    known: Sequence[pd.DataFrame], levels: Sequence[Level], level: float, draws: Draws | None
) -> tuple[dict[str, Constant], dict[str, float | None], list[str]]:
    """Change of the loss over the S of the grid, the tests of γ = 0, and notes on what stays out of them."""
    mixed = [i for i, k in enumerate(known) if k["collapsed"].any() and not k["collapsed"].all()]
    alike = [levels[i].label for i in range(len(levels)) if i not in mixed]
    notes = [f"every run ended alike at {', '.join(alike)}: no part of the tests on S"] if alike else []
    if 0 not in mixed or len(mixed) < 2:
        return {}, {}, [*notes, "the dependence on S needs both outcomes at the reference and at another level"]
    kept = [levels[i] for i in mixed]
    c = group_levels([known[i] for i in mixed])
    n = len(kept)
    X = design(c, n, np.eye(n)[:, 1:])
    if len(set(c.S)) < 2 or np.linalg.matrix_rank(X) < X.shape[1]:
        return {}, {}, [*notes, "the dependence on S needs every level at two values of S or more"]
    full = fit_model(c, X, draws)
    z = scores(kept)
    trend = None if z is None else fit_model(c, design(c, n, np.array(z)[:, None]), draws)
    if not (full.rises and (trend is None or trend.rises)):
        return {}, {}, [*notes, "collapse does not become likelier with the learning rate: no dependence on S is given"]
    span, where = float(np.ptp(c.x)), f"at S={c.S.max():g} less that at S={c.S.min():g}"
    constants = {
        f"change_dex[{v.label}]": ratio_dex(full, 1 + n + i, level, span, f"loss of {v.label} {where}")
        for i, v in enumerate(kept[1:], start=1)
    }
    tests = _test("all", full, n)
    if trend is not None:
        meaning = f"loss {where}, for each unit of z (a decade of the level)"
        constants["trend_dex"] = ratio_dex(trend, 2 + n, level, span, meaning)
        tests |= _test("trend", trend, n)
    return constants, tests, notes


def _test(name: str, model: Model, n_levels: int) -> dict[str, float | None]:
    """Penalised likelihood ratio of γ = 0 in a design, its degrees of freedom and p-value."""
    X, n_additive = model.X, 2 + n_levels
    held = maximise(X, model.cells.m, model.cells.k, np.eye(X.shape[1])[:, :n_additive])
    ratio, df = 2 * (model.at.ll - held.ll), X.shape[1] - n_additive
    return {f"lr_{name}": ratio, f"df_{name}": float(df), f"p_{name}": float(stats.chi2.sf(max(ratio, 0.0), df))}


def _verdict(constants: dict[str, Constant], tests: dict[str, float | None], level: float) -> dict[str, Any]:
    """Whether the loss depends on S: decided by the trend where there is one, else by all levels at once."""
    name = "trend" if "p_trend" in tests else "all"
    p = tests.get(f"p_{name}")
    if p is None:
        return {}
    changes = [c for key, c in constants.items() if key.startswith("change_dex")]
    ends = [(c.interval.lo, c.interval.hi) for c in changes if c.interval is not None]
    if p < 1 - level:
        up, down = any(lo is not None and lo > 0 for lo, _ in ends), any(hi is not None and hi < 0 for _, hi in ends)
        total = constants["trend_dex"].value if name == "trend" else sum(c.value or 0.0 for c in changes)
        word = GROWS if (total or 0.0) > 0 else SHRINKS
        return {"verdict": CHANGES if up and down else word, "decided_by": name}
    small = all(lo is not None and hi is not None and max(-lo, hi) <= MARGIN_DEX for lo, hi in ends)
    quiet = all((v is None or v >= 1 - level) for key, v in tests.items() if key.startswith("p_"))
    return {"verdict": ADDITIVE if small and quiet else OPEN, "decided_by": name}


def _local_rows(frames: Frames, definition: str, level: float, draws: Draws | None) -> list[dict[str, Any]]:
    """η50 at each (level, S), every level by itself, and its loss against the reference at that S."""
    located: list[Located | None] = []
    for v, frame in frames:
        some = len(decided(frame)) > 0
        found = locate(frame, definition=definition, arm=v.label, draws=draws, level=level) if some else None
        located.append(found)
    reference, rows = located[0] if located else None, []
    for i, ((v, _), at) in enumerate(zip(frames, located, strict=True)):
        for s, span in zip(at.S, at.spans, strict=True) if at is not None else ():
            loss = None
            if i and at is not None and reference is not None and s in reference.S:
                loss = _loss_row(difference(at, reference, (s,), draws))
            rows.append({"level": v.label, "size": v.size, "S": s, "eta50": span.row(), "loss": loss})
    return rows


def _loss_row(push: Span) -> dict[str, Any]:
    """A push (log₁₀ of η50 over that of the reference) turned into a loss in dex; an infinite end is None."""
    sides = {"left": "right", "right": "left"}
    outer = push.outer or (push.lo, push.hi)
    ends = {"lo": -push.hi, "hi": -push.lo, "outer_lo": -outer[1], "outer_hi": -outer[0]}
    finite = {name: value + 0.0 if math.isfinite(value) else None for name, value in ends.items()}
    return {"censoring": sides.get(push.censoring, push.censoring), **finite}


def _settings(axis: str, levels: Sequence[Level], level: float, draws: Draws | None) -> dict[str, Any]:
    bootstrap = None
    if draws is not None:
        exact = len(draws.seeds) <= MAX_ENUMERATED
        bootstrap = {"seeds": len(draws.seeds), "exact": exact, "rng_seed": None if exact else BOOTSTRAP_SEED}
    return {
        "axis": axis,
        "reference": levels[0].label if levels else None,
        "levels": [{"label": v.label, "size": v.size} for v in levels],
        "scores": scores(levels) if len(levels) > 1 else None,
        "level": level,
        "margin_dex": MARGIN_DEX,
        "bootstrap": bootstrap,
    }


def _hash(frames: Frames) -> str:
    """sha256 over the levels in order and the hashes of their rows."""
    text = "\n".join(f"{v.label},{v.size!r},{input_hash(frame)}" for v, frame in frames)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
