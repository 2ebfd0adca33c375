"""How far each arm pushes the contour: a row an arm, both definitions side by side, arrows where a push is censored."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stalefront.analysis.figures.style import INK, MUTED, empty, look, new_figure, number
from stalefront.analysis.push import DEFINITIONS, UNKNOWN, Comparison, pooled, read_push
from stalefront.analysis.verdicts import DEFAULT

TITLES = {"first_zero": "first_zero: touches zero", DEFAULT: f"{DEFAULT}: falls to zero for good"}
COLUMNS = ("arm", "label", "definition", "estimate", "bound", "censoring", "lo", "hi", "reads", "n", "n_collapsed")
CLEAR = "#00336b"
ROW = 0.21
LABEL = 46
# Intervals are cut this many octaves beyond the outermost point.
MARGIN = 1.6
MOST_TICKS = 8


def data(comparison: Comparison) -> pd.DataFrame:
    """What the figure shows.

    Parameters
    ----------
    comparison : Comparison

    Returns
    -------
    DataFrame
        A row an arm and definition, in the order drawn: ``estimate`` of the ratio or its ``bound``, ``censoring``
        (none | right: at least | left: at most | both: not comparable), the ``lo`` and ``hi`` of its interval (absent =
        unbounded), what it ``reads`` as, ``n`` decided runs and ``n_collapsed`` of the arm.
    """
    rows: list[dict[str, Any]] = []
    for arm in comparison.others:
        inert = any(r.startswith("inert") for r in comparison.remarks[arm.label])
        for definition in DEFINITIONS:
            fit = comparison.fits[(arm.label, definition)]
            push = pooled(fit)["push"]
            lo, hi = push["outer"] or (None, None)
            known = push["lo"] if push["lo"] is not None else push["hi"]
            rows.append(
                {
                    "arm": arm.label,
                    "label": arm.short + (" (inert)" if inert else ""),
                    "definition": definition,
                    "estimate": known if push["censoring"] == "none" else None,
                    "bound": known if push["censoring"] in ("left", "right") else None,
                    "censoring": push["censoring"],
                    "lo": lo,
                    "hi": hi,
                    "reads": read_push(push),
                    "n": fit.n,
                    "n_collapsed": fit.n_events,
                }
            )
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    frame.attrs["note"] = f"Reference: {comparison.reference.label}."
    return frame


def draw(frame: pd.DataFrame) -> Figure:
    """Draw two panels, one a definition, on a log2 axis of the ratio; filled where the interval excludes 1."""
    with look():
        arms = list(dict.fromkeys(frame["arm"]))
        if not arms:
            figure = new_figure(5, 1.5)
            empty(figure.subplots(), "no arm to hold against the reference")
            return figure
        figure = new_figure(10.4, 1.55 + ROW * max(len(arms), 3))
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        low, high = _limits(frame)
        for axes, definition in zip(panels, DEFINITIONS, strict=True):
            axes.set_title(TITLES[definition])
            _panel(axes, frame[frame["definition"] == definition].set_index("arm").loc[arms], low, high)
        labels = frame.drop_duplicates("arm").set_index("arm")["label"]
        panels[0].set_yticks(range(len(arms)), [_fitted(labels[a]) for a in arms], fontsize=7.5)
        panels[0].set_ylim(len(arms) - 0.4, -0.6)
        panels[1].label_outer(remove_inner_ticks=True)
        figure.supxlabel("push: η50 of the arm over that of the reference (log₂ scale)", fontsize=9)
        figure.legend(handles=_legend(), loc="outside upper center", ncols=5, fontsize=7.5)
        return figure


def _fitted(label: str) -> str:
    """A label short enough for its row: the middle is left out."""
    if len(label) <= LABEL:
        return label
    head = LABEL * 2 // 3
    return f"{label[:head]}…{label[head + 1 - LABEL :]}"


def _limits(frame: pd.DataFrame) -> tuple[float, float]:
    """Ends of the axis in octaves: all points, and 1, with a margin."""
    points = [math.log2(float(v)) for name in ("estimate", "bound") for v in frame[name].dropna()]
    ends = [math.log2(float(v)) for name in ("lo", "hi") for v in frame[name].dropna() if float(v) > 0]
    low, high = min([0.0, *points]), max([0.0, *points])
    return max(min([low - 0.5, *ends]), low - MARGIN) - 0.1, min(max([high + 0.5, *ends]), high + MARGIN) + 0.1


def _panel(axes: Axes, part: pd.DataFrame, low: float, high: float) -> None:
    axes.axvline(0, color=INK, lw=1.0, zorder=1)
    axes.set_xlim(low, high)
    step = max(1, math.ceil((high - low) / MOST_TICKS))
    octaves = [o for o in range(math.ceil(low), math.floor(high) + 1) if o % step == 0]
    axes.set_xticks(octaves, [number(2.0**o) for o in octaves])
    axes.grid(axis="x", lw=0.6)
    for y in range(1, len(part), 2):
        axes.axhspan(y - 0.5, y + 0.5, color="#f4f6f9", lw=0, zorder=0)
    for y, row in enumerate(part.to_dict("records")):
        _row(axes, y, row, low, high)
        text = f"{row['n_collapsed']}/{row['n']}"
        axes.annotate(
            text, (1.01, y), xycoords=axes.get_yaxis_transform(), fontsize=6.5, color=MUTED, va="center", clip_on=False
        )
    axes.annotate("collapsed/n", (1.01, 1.005), xycoords="axes fraction", fontsize=6.5, color=MUTED, va="bottom")


def _row(axes: Axes, y: int, row: dict[Any, Any], low: float, high: float) -> None:
    """One push: its interval, cut with an arrow head where it goes on, and its point or bound."""
    if row["censoring"] == "both":
        axes.text(0.08, y, UNKNOWN, fontsize=6.5, color=MUTED, va="center", style="italic")
        return
    clear = row["reads"] in ("further out", "further in")
    colour = CLEAR if clear else MUTED
    ends = [edge if v is None else math.log2(float(v)) for v, edge in ((row["lo"], -np.inf), (row["hi"], np.inf))]
    shown = [min(max(e, low + 0.04), high - 0.04) for e in ends]
    axes.plot(shown, [y, y], color=colour, lw=1.5, solid_capstyle="butt", zorder=2)
    for end, at, marker in ((ends[0], shown[0], "<"), (ends[1], shown[1], ">")):
        cut = end != at
        axes.plot([at], [y], ls="", marker=marker if cut else "|", ms=4 if cut else 5, color=colour, zorder=2.5)
    if row["censoring"] == "none":
        value, marker = float(row["estimate"]), "o"
    else:
        value, marker = float(row["bound"]), ">" if row["censoring"] == "right" else "<"
    face = colour if clear else "white"
    axes.plot([math.log2(value)], [y], ls="", marker=marker, ms=6, mfc=face, mec=colour, mew=1.1, zorder=3)


def _legend() -> list[Any]:
    style: dict[str, Any] = {"ls": "", "ms": 6, "mew": 1.1}
    return [
        Line2D([], [], marker="o", mfc=CLEAR, mec=CLEAR, label="interval excludes 1", **style),
        Line2D([], [], marker="o", mfc="white", mec=MUTED, label="interval contains 1", **style),
        Line2D([], [], marker=">", mfc="white", mec=MUTED, label="at least (beyond the grid)", **style),
        Line2D([], [], marker="<", mfc="white", mec=MUTED, label="at most", **style),
        Line2D([], [], marker=">", color=MUTED, ms=4, lw=1.5, label="interval goes on"),
    ]
