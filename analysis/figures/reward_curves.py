"""Reward over learner steps, small multiples over S × η, with the event intervals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from stalefront.analysis.figures.style import DASHES, INK, MUTED, empty, look, new_figure, number, shades, thin
from stalefront.analysis.verdicts import DEFAULT

COLUMNS = ("layer", "S", "lr", "seed", "step", "reward", "reward_lo", "reward_hi", "step_hi", "definition", "state")
# Beyond this many seeds single lines can't be told apart: median and range are drawn instead.
MAX_SEED_LINES = 5
BLANK_STATES = ("missing", "planned", "submitted")


def data(table: pd.DataFrame, curves: pd.DataFrame, arm: str, max_panels: int) -> pd.DataFrame:
    """What the small multiples of one arm show.

    Parameters
    ----------
    table, curves : DataFrame
        Run table and thinned curves.
    arm : str
        Arm label.
    max_panels : int
        Most panels drawn; beyond, S and η are thinned evenly and ``attrs["note"]`` says to what.

    Returns
    -------
    DataFrame
        ``layer``: ``line`` (a seed's point), ``band`` (median with range over seeds, where there are many),
        ``event`` (``step`` to ``step_hi``), ``state`` (one row a panel and unfinished state).
    """
    mine = table[(table["arm"] == arm) & table["S"].notna() & table["lr"].notna()]
    mine, note = _thin_panels(mine, max_panels)
    seeds = sorted(mine["seed"].unique(), key=str)
    rows: list[pd.DataFrame] = []
    labels = mine.set_index("cell_id")[["S", "lr", "seed"]]
    lines = curves[curves["cell_id"].isin(labels.index)].join(labels, on="cell_id")
    if len(seeds) > MAX_SEED_LINES:
        grouped = lines.groupby(["S", "lr", "step"])["reward"]
        band = grouped.agg(reward="median", reward_lo="min", reward_hi="max").reset_index()
        rows.append(band.assign(layer="band"))
    else:
        rows.append(lines[["S", "lr", "seed", "step", "reward"]].assign(layer="line"))
    rows.append(_events(mine))
    rows.append(_states(mine))
    frame = pd.concat([r.astype(object) for r in rows if len(r)] or [pd.DataFrame()])
    frame = frame.reindex(columns=list(COLUMNS)).reset_index(drop=True)
    frame.attrs["note"] = note
    return frame


def _thin_panels(mine: pd.DataFrame, max_panels: int) -> tuple[pd.DataFrame, str]:
    s_values, lr_values = sorted(set(mine["S"])), sorted(set(mine["lr"]))
    n_s, n_lr = len(s_values), len(lr_values)
    if n_s * n_lr <= max_panels:
        return mine, ""
    # Share the cut between the axes, at least two values of each.
    cut = math.sqrt(max_panels / (n_s * n_lr))
    keep_s = thin(s_values, max(2, int(n_s * cut)))
    keep_lr = thin(lr_values, max(2, min(max_panels // len(keep_s), n_lr)))
    text = (
        f"To stay readable, {len(keep_s)} of {n_s} values of S and {len(keep_lr)} of {n_lr} learning rates are drawn."
    )
    return mine[mine["S"].isin(keep_s) & mine["lr"].isin(keep_lr)], text


def _events(mine: pd.DataFrame) -> pd.DataFrame:
    rows = [
        {
            "layer": "event",
            "S": row["S"],
            "lr": row["lr"],
            "seed": row["seed"],
            "step": row[f"{d}_step_lo"],
            "step_hi": row[f"{d}_step_hi"],
            "definition": d,
        }
        for row in mine.to_dict("records")
        for d in ("first_zero", DEFAULT)
        if row[f"{d}_event"] is True
    ]
    return pd.DataFrame(rows, dtype=object)


def _states(mine: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for key, group in mine.groupby(["S", "lr"], sort=True):
        counts = group["state"].value_counts()
        text = ", ".join(f"{counts[k]} {k}" for k in sorted(counts.index) if k != "completed")
        rows.append({"layer": "state", "S": key[0], "lr": key[1], "state": text})
    return pd.DataFrame(rows, dtype=object)


def draw(frame: pd.DataFrame) -> Figure:
    """Draw small multiples: columns are S, rows are learning rates (largest on top)."""
    with look():
        s_values, lr_values = sorted(set(frame["S"])), sorted(set(frame["lr"]), reverse=True)
        if not s_values:
            figure = new_figure(5, 1.5)
            empty(figure.subplots(), "no cell has both S and a learning rate")
            return figure
        n_s, n_lr = len(s_values), len(lr_values)
        figure = new_figure(min(1.5 + 1.75 * n_s, 14.0), min(1.3 + 1.05 * n_lr, 22.0))
        grid = figure.subplots(n_lr, n_s, sharex=True, sharey=True, squeeze=False)
        seeds = sorted({s for s in frame[frame["layer"] == "line"]["seed"]}, key=str)
        colours = dict(zip(seeds, shades(len(seeds)), strict=True))
        panels = dict(list(frame.groupby(["S", "lr"])))
        for i, lr in enumerate(lr_values):
            for j, s in enumerate(s_values):
                _panel(grid[i, j], panels.get((s, lr)), colours)
                if i == 0:
                    grid[i, j].set_title(f"S = {number(float(s))}", loc="center")
            grid[i, 0].set_ylabel(f"η = {number(float(lr))}", fontsize=8)
        grid[0, 0].set_ylim(*_limits(frame))
        for axes in grid.flat:
            axes.label_outer(remove_inner_ticks=True)
        figure.supxlabel("learner steps", fontsize=9)
        figure.supylabel("mean reward", fontsize=9)
        figure.legend(handles=_legend(frame, seeds, colours), loc="outside upper center", ncols=4, fontsize=8)
        return figure


def _limits(frame: pd.DataFrame) -> tuple[float, float]:
    rewards = pd.to_numeric(frame[frame["layer"].isin(("line", "band"))]["reward"]).to_numpy(dtype=np.float64)
    finite = rewards[np.isfinite(rewards)]
    lo, hi = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if lo >= 0 and hi <= 1:
        # A share: the whole of it, so that runs at zero look like runs at zero.
        lo, hi = 0.0, 1.0
    pad = 0.08 * max(hi - min(lo, 0.0), 1e-6)
    return min(lo, 0.0) - pad, hi + 2 * pad


def _panel(axes: Axes, part: pd.DataFrame | None, colours: dict[Any, Any]) -> None:
    axes.axhline(0, color=MUTED, lw=0.6, ls=":")
    axes.tick_params(labelsize=7)
    if part is None:
        axes.text(0.5, 0.5, "not planned", ha="center", va="center", fontsize=7, color=MUTED, transform=axes.transAxes)
        return
    for number_, (seed, line) in enumerate(part[part["layer"] == "line"].groupby("seed", sort=True)):
        x, y = line["step"].astype(float), line["reward"].astype(float)
        axes.plot(x, y, color=colours[seed], lw=1.2, ls=DASHES[number_ % len(DASHES)])
        _non_finite(axes, x.to_numpy(), y.to_numpy())
    band = part[part["layer"] == "band"].astype({"step": float, "reward": float})
    if len(band):
        axes.fill_between(
            band["step"], band["reward_lo"].astype(float), band["reward_hi"].astype(float), color=MUTED, alpha=0.3, lw=0
        )
        axes.plot(band["step"], band["reward"], color=INK, lw=1.2)
    _mark_events(axes, part[part["layer"] == "event"])
    text = next(iter(part[part["layer"] == "state"]["state"]), "")
    if text:
        axes.text(0.99, 0.99, text, ha="right", va="top", fontsize=6.5, color=MUTED, transform=axes.transAxes)


def _mark_events(axes: Axes, events: pd.DataFrame) -> None:
    """Band and triangle per distinct event interval; several seeds share one."""
    at = axes.get_xaxis_transform()
    for definition, lo, hi in sorted(set(events[["definition", "step", "step_hi"]].itertuples(index=False, name=None))):
        strict = definition == DEFAULT
        axes.axvspan(float(lo), float(hi), color=INK, alpha=0.25 if strict else 0.12, lw=0)
        face = INK if strict else "white"
        axes.plot([float(hi)], [0.93], marker="v", ms=5, color=INK, mfc=face, transform=at, zorder=4 + strict)


def _non_finite(axes: Axes, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
    """Show non-finite rewards as crosses on the zero line instead of as a gap."""
    bad = ~np.isfinite(y)
    if bad.any():
        axes.plot(x[bad], np.zeros(int(bad.sum())), ls="", marker="x", ms=4, color=INK)


def _legend(frame: pd.DataFrame, seeds: list[Any], colours: dict[Any, Any]) -> list[Any]:
    handles: list[Any] = [
        Line2D([], [], color=colours[s], ls=DASHES[i % len(DASHES)], label=f"seed {s}") for i, s in enumerate(seeds)
    ]
    if (frame["layer"] == "band").any():
        handles += [Line2D([], [], color=INK, label="median of seeds"), Patch(color=MUTED, alpha=0.3, label="range")]
    marker: dict[str, Any] = {"color": INK, "marker": "v", "ls": "", "ms": 5}
    handles += [
        Line2D([], [], **marker, mfc="white", label="first zero"),
        Line2D([], [], **marker, mfc=INK, label="zero from here to the end"),
    ]
    return handles
