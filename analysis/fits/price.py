"""What a method costs where it is not needed: its reward at cells that are safe for every arm, less the reference's.

Notation: at each S that all arms share, the safe cell is the smallest learning rate common to all arms at which no run
of any arm collapses; R = mean held-out reward over the last third of the learner steps, averaged over the safe cells of
a seed. The price is the mean over seeds of R(arm) − R(reference), paired by seed; Student's t over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from stalefront.analysis.fits.base import Constant, Fit, Interval, input_hash, outcomes

# The definition that calls most runs collapsed, so that a safe cell is safe under the default one too.
DEFINITION = "first_zero"
MEANING = "mean held-out reward over the last third of the learner steps at the safe cells"


def safe_cells(table: pd.DataFrame, arms: Sequence[str]) -> dict[float, float]:
    """Learning rate of the safe cell at each S, for the S where there is one.

    Parameters
    ----------
    table : DataFrame
        Run table.
    arms : sequence of str
        Labels of the arms that must all have survived.
    """
    rates: dict[str, dict[float, set[float]]] = {}
    for arm in arms:
        frame = outcomes(table, DEFINITION, arm)
        mine: dict[float, set[float]] = {}
        groups: Any = frame[frame["S"].notna() & frame["lr"].notna()].groupby(["S", "lr"], sort=True)
        for (s, lr), group in groups:
            if all(c is False for c in group["collapsed"]):
                mine.setdefault(float(s), set()).add(float(lr))
        rates[arm] = mine
    found = {}
    for s in sorted(set.intersection(*(set(r) for r in rates.values())) if rates else set()):
        common = set.intersection(*(r[s] for r in rates.values()))
        if common:
            found[s] = min(common)
    return found


def rewards(table: pd.DataFrame, arm: str, cells: dict[float, float]) -> pd.Series[float]:
    """R of every seed that has a reward at all safe cells."""
    rows = table[(table["arm"] == arm) & table["reward_last_third"].notna() & table["S"].notna()]
    at = [cells.get(float(s)) == float(lr) for s, lr in zip(rows["S"], rows["lr"], strict=True)]
    found = rows[at].assign(reward=rows[at]["reward_last_third"].astype(float))
    per_seed = found.groupby("seed", sort=True)["reward"].agg(["mean", "size"])
    return per_seed[per_seed["size"] == len(cells)]["mean"]


def fit_price(table: pd.DataFrame, arm: str, reference: str, cells: dict[float, float], *, level: float) -> Fit:
    """Reward of one arm at the safe cells, and its difference from the reference.

    Parameters
    ----------
    table : DataFrame
        Run table.
    arm, reference : str
        Labels.
    cells : dict
        S → learning rate (:func:`safe_cells`); empty where no cell is safe for every arm, and nothing is then given.
    level : float
        Confidence of the interval, which needs two seeds.

    Returns
    -------
    Fit
        ``reward`` and ``price``; ``n`` counts seeds.
    """
    constants: dict[str, Constant] = {}
    n = 0
    if cells:
        mine, theirs = rewards(table, arm, cells), rewards(table, reference, cells)
        seeds = [s for s in mine.index if s in theirs.index]
        n = len(seeds)
        if n:
            paired = mine[seeds].to_numpy(dtype=np.float64) - theirs[seeds].to_numpy(dtype=np.float64)
            constants["reward"] = Constant(float(mine[seeds].mean()), None, "reward", MEANING)
            meaning = f"{MEANING}, less that of the reference"
            constants["price"] = Constant(float(paired.mean()), _interval(paired, level), "reward", meaning)
    frame = outcomes(table, DEFINITION, arm)
    return Fit(
        name="price",
        definition=DEFINITION,
        arm=arm,
        constants=constants,
        n=n,
        n_events=0,
        n_left=0,
        n_right=0,
        n_undecided=0,
        method="mean of paired differences over seeds, Student's t",
        settings={"level": level, "reference": reference},
        input_hash=input_hash(frame),
        rows=[{"S": s, "lr": lr} for s, lr in cells.items()],
        notes=[] if cells else ["no learning rate is safe for every arm at any S"],
    )


def _interval(paired: np.ndarray[tuple[int], np.dtype[np.float64]], level: float) -> Interval | None:
    if len(paired) < 2:
        return None
    half = float(stats.t.ppf((1 + level) / 2, len(paired) - 1)) * float(paired.std(ddof=1)) / math.sqrt(len(paired))
    return Interval(float(paired.mean()) - half, float(paired.mean()) + half, "t", level)
