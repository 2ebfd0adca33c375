"""Cosine of consecutive applied gradients over a run, within the reuse cycle and at the refresh told apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stalefront.analysis.figures.style import DASHES, MUTED, empty, look, new_figure, number, shades, thin

COLUMNS = ("S", "lr", "where", "step", "cosine", "n")
WHERE = {"refresh": "at the refresh\n(two different batches)", "within": "within the cycle\n(same batch twice)"}
MAX_S, MAX_LR = 6, 6
# Assumed: three bins of a thirty-second of the run each; enough to read a trend through batch noise.
SMOOTH_BINS = 3


def data(table: pd.DataFrame, cosines: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Mean cosine over the seeds of each (S, η), smoothed, for at most six S and six η (evenly thinned).

    Parameters
    ----------
    table, cosines : DataFrame
        Run table and binned cosines.
    arm : str
        Arm label.

    Returns
    -------
    DataFrame
        ``S, lr, where (refresh | within), step, cosine, n``; ``n`` is the number of cosines behind the point, and
        ``cosine`` their mean over the bin and its neighbours. ``attrs["note"]`` says what was thinned.
    """
    mine = table[(table["arm"] == arm) & table["S"].notna() & table["lr"].notna()]
    s_all, lr_all = sorted(set(mine["S"])), sorted(set(mine["lr"]))
    s_kept, lr_kept = thin(s_all, MAX_S), thin(lr_all, MAX_LR)
    labels = mine[mine["S"].isin(s_kept) & mine["lr"].isin(lr_kept)].set_index("cell_id")[["S", "lr"]]
    rows = cosines[cosines["cell_id"].isin(labels.index)].join(labels, on="cell_id")
    parts = [_smoothed(key, group, where) for key, group in rows.groupby(["S", "lr"], sort=True) for where in WHERE]
    kept = [p for p in parts if len(p)]
    frame = pd.concat(kept, ignore_index=True) if kept else pd.DataFrame(columns=list(COLUMNS))
    thinned = len(s_kept) < len(s_all) or len(lr_kept) < len(lr_all)
    frame.attrs["note"] = (
        f"To stay readable, {len(s_kept)} of {len(s_all)} values of S and {len(lr_kept)} of {len(lr_all)} learning "
        "rates are drawn."
        if thinned
        else ""
    )
    return frame


def _smoothed(key: Any, group: pd.DataFrame, where: str) -> pd.DataFrame:
    """Count-weighted mean over seeds and over a bin with its neighbours."""
    weighted = pd.DataFrame(
        {
            "step": group["step"].astype(float),
            "n": group[f"n_{where}"].astype(float),
            "total": (group[where].fillna(0.0) * group[f"n_{where}"]).astype(float),
        }
    )
    binned = weighted.groupby("step", sort=True)[["n", "total"]].sum()
    rolled = binned.rolling(SMOOTH_BINS, center=True, min_periods=1).sum()
    out = pd.DataFrame(
        {
            "step": binned.index,
            "cosine": (rolled["total"] / rolled["n"].replace(0, np.nan)).to_numpy(),
            "n": binned["n"].to_numpy(),
        }
    )
    out = out[out["n"] > 0]
    return out.assign(S=key[0], lr=key[1], where=where)[list(COLUMNS)]


def draw(frame: pd.DataFrame) -> Figure:
    """Draw columns of S, rows of where in the cycle, one line a learning rate (darker = smaller)."""
    with look():
        s_values, lr_values = sorted(set(frame["S"])), sorted(set(frame["lr"]))
        if not s_values:
            figure = new_figure(5, 1.5)
            empty(figure.subplots(), "no gradient cosine on record")
            return figure
        figure = new_figure(min(1.8 + 1.9 * len(s_values), 13.0), 4.4)
        grid = figure.subplots(2, len(s_values), sharex=True, sharey=True, squeeze=False)
        look_of = {
            lr: (c, DASHES[i % len(DASHES)])
            for i, (lr, c) in enumerate(zip(lr_values, shades(len(lr_values)), strict=True))
        }
        for j, s in enumerate(s_values):
            for i, where in enumerate(WHERE):
                _panel(grid[i, j], frame[(frame["S"] == s) & (frame["where"] == where)], look_of)
            grid[0, j].set_title(f"S = {number(float(s))}", loc="center")
        for i, text in enumerate(WHERE.values()):
            grid[i, 0].set_ylabel(text, fontsize=8)
        lowest = float(np.nanmin(frame["cosine"].to_numpy(dtype=np.float64)))
        grid[0, 0].set_ylim(min(-0.15, max(lowest, -1.0) - 0.05), 1.05)
        for axes in grid.flat:
            axes.label_outer(remove_inner_ticks=True)
        figure.supxlabel("learner steps", fontsize=9)
        figure.supylabel("cosine of consecutive applied gradients", fontsize=9)
        handles = [Line2D([], [], color=c, ls=d, label=f"η = {number(float(lr))}") for lr, (c, d) in look_of.items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(6, len(handles)), fontsize=8)
        return figure


def _panel(axes: Axes, part: pd.DataFrame, look_of: dict[Any, tuple[Any, Any]]) -> None:
    axes.axhline(0, color=MUTED, lw=0.7, ls=":")
    axes.tick_params(labelsize=7)
    if not len(part):
        axes.text(0.5, 0.5, "none", ha="center", va="center", color=MUTED, fontsize=8, transform=axes.transAxes)
    for lr, line in part.groupby("lr", sort=True):
        colour, dash = look_of[lr]
        single: dict[str, Any] = {"marker": "o", "ms": 3} if len(line) == 1 else {}
        axes.plot(line["step"].astype(float), line["cosine"].astype(float), color=colour, ls=dash, lw=1.4, **single)
