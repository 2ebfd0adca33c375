"""Bracket of the largest learning rate that survives, per S (interval censoring of η_max)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from stalefront.analysis.fits.base import Constant, Fit, Interval, decided, input_hash

RULES = ("conservative", "optimistic")


@dataclass(frozen=True)
class Bracket:
    """Where η_max lies at one S: in [lo, hi). ``lo`` is 0 if left-censored, ``hi`` is inf if right-censored.

    ``conservative`` ends at the first collapse from below, ``optimistic`` starts at the last survival. They differ
    only where the outcome is not monotone in η, or where seeds differ. ``seed`` is None for seeds pooled.
    """

    S: float
    seed: Any
    n: int
    n_seeds: int
    conservative: tuple[float, float]
    optimistic: tuple[float, float]
    inversions: int

    @property
    def censoring(self) -> str:
        """``left`` (all collapse), ``right`` (none does), or ``interval``; of the conservative bracket."""
        if math.isinf(self.conservative[1]):
            return "right"
        return "left" if self.conservative[0] == 0 else "interval"

    def row(self) -> dict[str, Any]:
        """JSON-able; 0 and inf ends become None (unbounded)."""
        out = asdict(self)
        for rule in RULES:
            lo, hi = out.pop(rule)
            out[f"{rule}_lo"] = lo if lo > 0 else None
            out[f"{rule}_hi"] = hi if math.isfinite(hi) else None
        return {**out, "censoring": self.censoring}


def bracket(S: float, seed: Any, lr: np.ndarray[Any, Any], collapsed: np.ndarray[Any, Any], n_seeds: int) -> Bracket:
    """Bracket η_max from outcomes at one S.

    conservative: hi = smallest collapsed η, lo = largest surviving η below it;
    optimistic: lo = largest surviving η, hi = smallest collapsed η above it (arXiv 2607.01083's two readings of a
    non-monotone row). With seeds pooled, the first holds for every seed and the second for the hardiest one.

    Parameters
    ----------
    lr, collapsed : arrays, shape (N,)
        Learning rates and outcomes; several seeds may share a rate.
    """
    bad, good = np.sort(lr[collapsed]), np.sort(lr[~collapsed])
    hi = float(bad[0]) if len(bad) else math.inf
    below = good[good < hi]
    lo_opt = float(good[-1]) if len(good) else 0.0
    above = bad[bad > lo_opt]
    return Bracket(
        S=S,
        seed=seed,
        n=len(lr),
        n_seeds=n_seeds,
        conservative=(float(below[-1]) if len(below) else 0.0, hi),
        optimistic=(lo_opt, float(above[0]) if len(above) else math.inf),
        inversions=int(sum(int((good > b).sum()) for b in bad)),
    )


def brackets(frame: pd.DataFrame) -> tuple[list[Bracket], list[Bracket]]:
    """Brackets per S with seeds pooled, and per (S, seed). Undecided cells widen a bracket as if not on the grid.

    Inversions (pairs η < η′ of one seed with collapse at η only) are counted within seeds; the pooled count is their
    sum, since two seeds that differ are not an inversion.
    """
    known = decided(frame)
    pooled, single = [], []
    for s, at_s in known.groupby("S", sort=True):
        units = [
            bracket(float(str(s)), seed, g["lr"].to_numpy(), g["collapsed"].to_numpy(), 1)
            for seed, g in at_s.groupby("seed", sort=True, dropna=False)
        ]
        whole = bracket(float(str(s)), None, at_s["lr"].to_numpy(), at_s["collapsed"].to_numpy(), len(units))
        inversions = sum(u.inversions for u in units)
        pooled.append(Bracket(**{**_fields(whole), "inversions": inversions}))
        single.extend(units)
    return pooled, single


def _fields(b: Bracket) -> dict[str, Any]:
    return {name: getattr(b, name) for name in Bracket.__dataclass_fields__}


def fit_eta_max(frame: pd.DataFrame, *, definition: str, arm: str) -> Fit:
    """Bracket η_max(S) in one arm.

    Parameters
    ----------
    frame : DataFrame
        Outcome frame (``fits.base``).
    definition, arm : str
        Labels carried into the fit.

    Returns
    -------
    Fit
        ``eta_max[S=…]`` with its interval from the conservative lower to the optimistic upper end; no value, since
        only the bracket is known. Where one seed is not monotone no single η_max exists: the constant then has no
        interval either and the two brackets are left in ``rows``.
    """
    pooled, single = brackets(frame)
    notes: list[str] = []
    constants = {f"eta_max[S={b.S:g}]": _constant(b, notes) for b in pooled}
    known = decided(frame)
    return Fit(
        name="eta_max",
        definition=definition,
        arm=arm,
        constants=constants,
        n=len(known),
        n_events=int(known["collapsed"].sum()),
        n_left=sum(b.censoring == "left" for b in pooled),
        n_right=sum(b.censoring == "right" for b in pooled),
        n_undecided=len(frame) - len(known),
        method="bracket by the grid: first collapse from below (conservative), last survival from below (optimistic)",
        settings={"rules": list(RULES)},
        input_hash=input_hash(frame),
        rows=[b.row() for b in [*pooled, *single]],
        tests={"inversions": float(sum(b.inversions for b in pooled))},
        notes=notes,
    )


def _constant(b: Bracket, notes: list[str]) -> Constant:
    meaning = f"largest learning rate that does not collapse at S={b.S:g}"
    if b.inversions and b.n_seeds == 1:
        notes.append(
            f"S={b.S:g}: {b.inversions} inversion(s) on a single seed (a lower learning rate collapsed, a higher one "
            "did not); no single η_max is given, more seeds are needed"
        )
        return Constant(None, None, "learning rate", meaning)
    lo, hi = b.conservative[0], b.optimistic[1]
    interval = Interval(lo if lo > 0 else None, hi if math.isfinite(hi) else None, "bracket")
    return Constant(None, interval, "learning rate", meaning)
