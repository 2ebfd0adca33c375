"""The S × η map: how many seeds collapsed in each cell, under two definitions side by side."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke

from stalefront.analysis.figures.style import GRID, INK, MUTED, edges, empty, log2_ticks, look, new_figure, number
from stalefront.analysis.fits.base import Fit, outcomes
from stalefront.analysis.fits.firth import contour
from stalefront.analysis.verdicts import DEFAULT

DEFINITIONS = ("first_zero", DEFAULT)
TITLES = {"first_zero": "first_zero: touched zero at least once", DEFAULT: f"{DEFAULT}: fell to zero and stayed"}
COLUMNS = ("layer", "definition", "S", "lr", "lr_hi", "n_planned", "n_decided", "n_collapsed", "states", "differs")
# More cells than this in a panel leave no room for text; colour, hatch and outline remain.
MAX_TEXT_CELLS = 160


def data(table: pd.DataFrame, arm: str, fits: list[Fit]) -> pd.DataFrame:
    """What the map of one arm shows.

    Parameters
    ----------
    table : DataFrame
        Run table.
    arm : str
        Arm label.
    fits : list of Fit
        Fits of any arm and definition; ``firth`` and ``eta_max`` of this arm are drawn over the map.

    Returns
    -------
    DataFrame
        ``layer`` is ``cell`` (a row a definition and (S, η): seeds planned, decided, collapsed, ``states`` of
        undecided ones, ``differs`` where the definitions disagree for any seed), ``contour`` (a row a point of
        η50(S)) or ``bracket`` (``lr`` to ``lr_hi``, the conservative lower and optimistic upper end; absent = open).
    """
    rows: list[dict[str, Any]] = []
    for definition in DEFINITIONS:
        rows.extend(_cells(table, arm, definition))
        for fit in fits:
            if (fit.arm, fit.definition) == (arm, definition):
                rows.extend(_overlay(fit))
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    off = int((pd.to_numeric(table[table["arm"] == arm]["lr"]) <= 0).sum())
    frame.attrs["note"] = f"{off} cell(s) with learning rate 0 have no place on a log axis." if off else ""
    return frame


def _cells(table: pd.DataFrame, arm: str, definition: str) -> list[dict[str, Any]]:
    known = outcomes(table, definition, arm)
    mine = table[table["arm"] == arm].reset_index(drop=True)
    first, strict = (mine[f"{d}_event"] for d in DEFINITIONS)
    known["differs"] = [a is True and b is False for a, b in zip(first, strict, strict=True)]
    # Why an undecided cell is so: its state, or "undecided" for a finished run whose record doesn't say.
    known["why"] = ["undecided" if s in ("completed", "non-finite") else s for s in mine["state"]]
    known = known[known["S"].notna() & (pd.to_numeric(known["lr"]) > 0)]
    rows = []
    for key, group in known.groupby(["S", "lr"], sort=True):
        s, lr = key
        open_cells = group[group["collapsed"].isna()]["why"]
        counts = open_cells.value_counts()
        rows.append(
            {
                "layer": "cell",
                "definition": definition,
                "S": s,
                "lr": lr,
                "n_planned": len(group),
                "n_decided": len(group) - len(open_cells),
                "n_collapsed": int((group["collapsed"] == True).sum()),  # noqa: E712  (object column with None)
                "states": ", ".join(f"{counts[k]} {k}" for k in sorted(counts.index)),
                "differs": bool(group["differs"].any()),
            }
        )
    return rows


def _overlay(fit: Fit) -> list[dict[str, Any]]:
    base = {"definition": fit.definition}
    if fit.name == "eta_max":
        pooled = [r for r in fit.rows if r["seed"] is None]
        return [
            {**base, "layer": "bracket", "S": r["S"], "lr": r["conservative_lo"], "lr_hi": r["optimistic_hi"]}
            for r in pooled
        ]
    if fit.name != "firth" or not fit.constants:
        return []
    s_values = sorted(float(k[len("eta50[S=") : -1]) for k in fit.constants if k.startswith("eta50"))
    s = np.exp(np.linspace(math.log(s_values[0]), math.log(s_values[-1]), 33))
    eta50 = contour(fit, s)
    assert eta50 is not None
    return [{**base, "layer": "contour", "S": float(a), "lr": float(b)} for a, b in zip(s, eta50, strict=True)]


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the map of one arm: two panels, log2 axes, counts of seeds in the cells."""
    with look():
        cells = frame[frame["layer"] == "cell"]
        n_s, n_lr = cells["S"].nunique(), cells["lr"].nunique()
        figure = new_figure(min(max(2.4 + 1.5 * n_s, 8.6), 13.0), min(2.3 + 0.48 * max(n_lr, 4), 9.0))
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, definition in zip(panels, DEFINITIONS, strict=True):
            axes.set_title(TITLES[definition])
            part = frame[frame["definition"] == definition]
            if cells.empty:
                empty(axes, "no cell has both S and a learning rate")
            else:
                _panel(axes, part)
        if not cells.empty:
            for axes in panels:
                axes.label_outer(remove_inner_ticks=True)
            panels[0].set_ylabel("learning rate η (log₂ scale)")
            figure.supxlabel("staleness S (updates, log₂ scale)", fontsize=9)
            figure.legend(handles=_legend(frame), loc="outside upper center", ncols=3, fontsize=8)
        return figure


def _panel(axes: Axes, part: pd.DataFrame) -> None:
    cells = part[part["layer"] == "cell"]
    s_values = sorted({float(v) for v in cells["S"]})
    columns = dict(zip(s_values, edges([math.log2(v) for v in s_values]), strict=True))
    text = len(cells) <= MAX_TEXT_CELLS
    for key, group in cells.groupby("S", sort=True):
        x = columns[float(str(key))]
        ordered = group.sort_values("lr")
        for row, y in zip(
            ordered.itertuples(), edges([math.log2(v) for v in ordered["lr"].astype(float)]), strict=True
        ):
            _cell(axes, row, x, y, text=text)
    lr = [float(v) for v in cells["lr"]]
    axes.set_xlim(min(c[0] for c in columns.values()), max(c[1] for c in columns.values()))
    span = edges(sorted({math.log2(v) for v in lr}))
    axes.set_ylim(span[0][0], span[-1][1])
    log2_ticks(axes.xaxis, s_values)
    log2_ticks(axes.yaxis, lr)
    _brackets(axes, part[part["layer"] == "bracket"], columns)
    curve = part[part["layer"] == "contour"]
    if len(curve):
        log_s, log_lr = np.log2(curve["S"].astype(float)), np.log2(curve["lr"].astype(float))
        axes.plot(log_s, log_lr, color="white", lw=3.6, zorder=4)
        axes.plot(log_s, log_lr, color=INK, lw=1.6, ls=(0, (4, 1.6)), zorder=5)


def _cell(axes: Axes, row: Any, x: tuple[float, float], y: tuple[float, float], *, text: bool) -> None:
    """One cell: shade by the share of decided seeds that collapsed, hatched where seeds are undecided."""
    palette = sns.color_palette("cividis_r", as_cmap=True)
    share = row.n_collapsed / row.n_decided if row.n_decided else None
    face = "white" if share is None else palette(0.08 + 0.9 * share)
    box = (x[0], y[0]), x[1] - x[0], y[1] - y[0]
    hatch = "" if row.n_decided == row.n_planned else ("xxx" if "failed" in row.states else "///")
    edge = GRID if share is None else "white"
    axes.add_patch(Rectangle(*box, facecolor=face, edgecolor=edge, lw=1.2, zorder=1))
    if hatch:
        axes.add_patch(Rectangle(*box, fill=False, edgecolor=MUTED, hatch=hatch, lw=0, zorder=2))
    if row.differs:
        inset_x, inset_y = 0.05 * box[1], 0.08 * box[2]
        corner = (x[0] + inset_x, y[0] + inset_y)
        inner = (corner, box[1] - 2 * inset_x, box[2] - 2 * inset_y)
        axes.add_patch(Rectangle(*inner, fill=False, edgecolor="white", lw=2.8, zorder=2.4))
        axes.add_patch(Rectangle(*inner, fill=False, edgecolor=INK, lw=1.3, ls=(0, (2, 1)), zorder=2.5))
    if text:
        _label(axes, row, sum(x) / 2, sum(y) / 2, face, dark=share is not None and share > 0.45)


def _label(axes: Axes, row: Any, x: float, y: float, face: Any, *, dark: bool) -> None:
    """Counts of a cell, or the state of a cell without any; the halo keeps hatches and lines off the letters."""
    label = f"{row.n_collapsed}/{row.n_decided}" if row.n_decided else row.states.split(",")[0].split(" ", 1)[-1]
    colour = "white" if dark else INK
    effects = [withStroke(linewidth=4.5, foreground=face)]
    axes.text(
        x,
        y,
        label + (" ≠" if row.differs else ""),
        ha="center",
        va="center",
        color=colour,
        fontsize=9,
        zorder=6,
        path_effects=effects,
    )


def _brackets(axes: Axes, found: pd.DataFrame, columns: dict[float, tuple[float, float]]) -> None:
    """Brackets of η_max as bars near the right edge of each column; an open end is an arrow."""
    bottom, top = axes.get_ylim()
    for row in found.itertuples():
        left, right = columns[float(str(row.S))]
        x = right - 0.11 * (right - left)
        ends = [None if pd.isna(v) else math.log2(float(v)) for v in (row.lr, row.lr_hi)]  # type: ignore[arg-type]
        lo = bottom + 0.02 * (top - bottom) if ends[0] is None else ends[0]
        hi = top - 0.02 * (top - bottom) if ends[1] is None else ends[1]
        for colour, width in (("white", 4.0), (INK, 1.6)):
            axes.plot([x, x], [lo, hi], color=colour, lw=width, solid_capstyle="butt", zorder=5.5)
        for end, y, arrow in ((ends[0], lo, "v"), (ends[1], hi, "^")):
            if end is None:
                axes.plot([x], [y], marker=arrow, mfc=INK, mec="white", ms=8, mew=0.8, zorder=5.6)
            else:
                axes.plot([x], [y], marker="_", color="white", ms=9, mew=3.2, zorder=5.4)
                axes.plot([x], [y], marker="_", color=INK, ms=7, mew=1.6, zorder=5.6)


def _legend(frame: pd.DataFrame) -> list[Any]:
    palette = sns.color_palette("cividis_r", as_cmap=True)
    n = int(frame[frame["layer"] == "cell"]["n_planned"].max())
    handles: list[Any] = [
        Patch(facecolor=palette(0.08), edgecolor=MUTED, label="0/n: no seed collapsed"),
        Patch(facecolor=palette(0.98), edgecolor=MUTED, label=f"n/n: every seed collapsed (n ≤ {number(n)})"),
        Patch(facecolor="white", edgecolor=MUTED, hatch="///", label="some or all seeds undecided, missing or failed"),
        Patch(facecolor="white", edgecolor=INK, ls=(0, (2, 1)), label="≠ the two definitions differ"),
    ]
    layers = set(frame["layer"])
    if "contour" in layers:
        handles.append(Line2D([], [], color=INK, ls=(0, (4, 1.6)), label="50 % contour (Firth logit)"))
    if "bracket" in layers:
        handles.append(Line2D([], [], color=INK, marker="_", ms=7, label="bracket of η_max (arrow: open end)", ls="-"))
    return handles
