"""t·η at collapse against η, with event intervals, and runs that did not collapse as right-censored arrows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stalefront.analysis.figures.style import INK, MARKERS, MUTED, empty, log2_ticks, look, new_figure, number, shades
from stalefront.analysis.fits.base import Fit, outcomes
from stalefront.analysis.verdicts import DEFAULT

DEFINITIONS = ("first_zero", DEFAULT)
TITLES = {"first_zero": "first_zero: first touches zero", DEFAULT: f"{DEFAULT}: falls to zero for good"}
COLUMNS = ("layer", "definition", "S", "lr", "seed", "lo", "mid", "hi", "censor")
# With more runs than this the intervals of single events hide one another and are left out of the drawing.
MAX_BARS = 300


def data(table: pd.DataFrame, arm: str, fits: list[Fit]) -> pd.DataFrame:
    """What the plot of one arm shows.

    Parameters
    ----------
    table : DataFrame
        Run table.
    arm : str
        Arm label.
    fits : list of Fit
        The ``t_eta`` fits of this arm give the line and its interval.

    Returns
    -------
    DataFrame
        ``layer``: ``event`` (``lo, mid, hi`` of Σ lr at collapse), ``censored`` (``mid`` = Σ lr spent without one,
        ``censor`` = how the run ended) or ``mean`` (geometric mean with its interval).
    """
    rows: list[dict[str, Any]] = []
    ends = table.set_index("cell_id")["end"].to_dict()
    for definition in DEFINITIONS:
        for row in outcomes(table, definition, arm).to_dict("records"):
            base = {k: row[k] for k in ("S", "lr", "seed")} | {"definition": definition}
            if row["collapsed"] is True and row["S"] is not None:
                lo, hi = float(row["t_eta_lo"]), float(row["t_eta_hi"])
                rows.append({**base, "layer": "event", "lo": lo, "mid": (lo + hi) / 2, "hi": hi})
            elif row["collapsed"] is False and row["censor_t_eta"] is not None and row["S"] is not None:
                rows.append({**base, "layer": "censored", "mid": row["censor_t_eta"], "censor": ends[row["cell_id"]]})
        rows.extend(
            {
                "layer": "mean",
                "definition": definition,
                "mid": c.value,
                "lo": i.lo if i else None,
                "hi": i.hi if i else None,
            }
            for f in fits
            if (f.name, f.arm, f.definition) == ("t_eta", arm, definition) and "t_eta" in f.constants
            for c, i in [(f.constants["t_eta"], f.constants["t_eta"].interval)]
        )
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    drawable = (pd.to_numeric(frame["mid"]) > 0) & (pd.to_numeric(frame["lr"]) > 0)
    return frame[(frame["layer"] == "mean") | drawable].reset_index(drop=True)


def draw(frame: pd.DataFrame) -> Figure:
    """Draw two panels, one a definition; log axes; a marker a value of S."""
    with look():
        runs = frame[frame["layer"] != "mean"]
        if runs.empty:
            figure = new_figure(5, 1.5)
            empty(figure.subplots(), "no run is decided yet")
            return figure
        figure = new_figure(9.2, 4.3)
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        s_values = sorted(set(runs["S"]))
        look_of = {
            s: (c, MARKERS[i % len(MARKERS)])
            for i, (s, c) in enumerate(zip(s_values, shades(len(s_values)), strict=True))
        }
        for axes, definition in zip(panels, DEFINITIONS, strict=True):
            axes.set_title(TITLES[definition])
            _panel(axes, frame[frame["definition"] == definition], look_of)
        panels[0].set_yscale("log", base=10)
        middle = frame["mid"].astype(float)
        top = max(
            float(middle.max()), float(frame["hi"].dropna().astype(float).max()) if frame["hi"].notna().any() else 0
        )
        panels[0].set_ylim(0.35 * float(middle.min()), 1.6 * top)
        log2_ticks(panels[0].xaxis, [float(v) for v in runs["lr"]], most=8)
        panels[0].set_ylabel("t·η at collapse: Σ lr (learning rate × steps, log scale)")
        panels[1].label_outer(remove_inner_ticks=True)
        figure.supxlabel("learning rate η (log₂ scale)", fontsize=9)
        figure.legend(handles=_legend(look_of), loc="outside upper center", ncols=6, fontsize=8)
        return figure


def _panel(axes: Axes, part: pd.DataFrame, look_of: dict[Any, tuple[Any, str]]) -> None:
    axes.grid(axis="y", lw=0.6)
    for row in part[part["layer"] == "mean"].to_dict("records"):
        axes.axhline(float(row["mid"]), color=INK, lw=1.2, ls=(0, (4, 1.6)), zorder=1)
        if row["lo"] is not None and row["hi"] is not None:
            axes.axhspan(float(row["lo"]), float(row["hi"]), color=MUTED, alpha=0.18, lw=0, zorder=0)
    # A small shift per S keeps markers of one learning rate apart.
    step = 0.36 / max(len(look_of), 1)
    for index, (s, (colour, marker)) in enumerate(look_of.items()):
        shift = (index - (len(look_of) - 1) / 2) * step
        _runs(axes, part[part["S"] == s], shift, colour, marker, bars=len(part) <= MAX_BARS)
    if part[part["layer"] == "event"].empty:
        axes.text(
            0.5,
            0.05,
            "no event: every triangle is a run that did not collapse",
            ha="center",
            color=MUTED,
            fontsize=8,
            transform=axes.transAxes,
        )


def _runs(axes: Axes, mine: pd.DataFrame, shift: float, colour: Any, marker: str, *, bars: bool) -> None:
    """Events and censored runs of one S."""
    for layer, rows in mine.groupby("layer", sort=True):
        x = np.log2(rows["lr"].astype(float)) + shift
        y = rows["mid"].astype(float)
        if layer == "censored":
            axes.vlines(x, y, 1.22 * y, color=colour, lw=0.9, zorder=2)
            axes.plot(x, y, ls="", marker="^", ms=4.5, mfc="white", mec=colour, mew=0.9, zorder=2.5)
            continue
        if bars:
            # An interval from 0 has no lower end on a log axis; it is cut well below the marker.
            axes.vlines(
                x,
                np.maximum(rows["lo"].astype(float), 0.02 * y),
                rows["hi"].astype(float),
                color=colour,
                lw=1.1,
                zorder=3,
            )
        axes.plot(x, y, ls="", marker=marker, ms=5.5, mfc=colour, mec="white", mew=0.5, zorder=4)


def _legend(look_of: dict[Any, tuple[Any, str]]) -> list[Any]:
    handles: list[Any] = [
        Line2D([], [], marker=m, color=c, ls="", ms=5.5, label=f"S = {number(float(s))}")
        for s, (c, m) in list(look_of.items())[:10]
    ]
    handles.append(Line2D([], [], marker="^", ls="", mfc="white", mec=INK, ms=5, label="did not collapse: at least"))
    handles.append(Line2D([], [], color=INK, ls=(0, (4, 1.6)), label="geometric mean, interval"))
    return handles
