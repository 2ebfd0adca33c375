"""What a level of mismatch costs the frontier: η50 over S a line a level, and its loss in dex against the level."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stalefront.analysis.figures.style import INK, MARKERS, MUTED, empty, log2_ticks, look, new_figure, number, shades
from stalefront.analysis.fits.base import Fit
from stalefront.analysis.fits.interaction import additive_eta50
from stalefront.analysis.verdicts import DEFAULT

TITLES = {"first_zero": "first_zero: touches zero", DEFAULT: f"{DEFAULT}: falls to zero for good"}
COLUMNS = ("layer", "definition", "level", "place", "S", "value", "lo", "hi", "censoring")
DASHED = (0, (4, 1.6))
DRAWN = ("none", "left", "right")


def data(fits: list[Fit]) -> pd.DataFrame:
    """What the figure shows.

    Parameters
    ----------
    fits : list of Fit
        ``interaction``, one a definition.

    Returns
    -------
    DataFrame
        ``layer`` is ``eta50`` (a row a level and S: value or bound, ``censoring``, interval), ``model`` (η50 of the
        additive model on a fine grid of S), ``loss`` (the same as ``eta50``, in dex) or ``additive`` (loss of the
        additive model). ``place`` is where a level stands on the axis: its size, or its number where it has none or is
        the reference. Absent ends are unbounded.
    """
    rows: list[dict[str, Any]] = []
    for fit in fits:
        places = level_places(fit)
        local = [r for r in fit.rows if r["level"] is not None]
        for r in local:
            base = {"definition": fit.definition, "level": r["level"], "place": places[r["level"]], "S": r["S"]}
            outer = r["eta50"]["outer"] or (None, None)
            rows.append({**base, "layer": "eta50", **_known(r["eta50"]), "lo": outer[0], "hi": outer[1]})
            if r["loss"] is not None:
                ends = {"lo": r["loss"]["outer_lo"], "hi": r["loss"]["outer_hi"]}
                rows.append({**base, "layer": "loss", **_known(r["loss"]), **ends})
        rows += _model_rows(fit, places, sorted({float(r["S"]) for r in local}))
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    frame.attrs["axis"] = fits[0].settings["axis"] if fits else ""
    frame.attrs["sized"] = bool(fits) and fits[0].settings["scores"] is not None
    return frame


def level_places(fit: Fit) -> dict[str, float]:
    """Place of every level on its axis: log₁₀ of the size and the reference one step below, or 0, 1, 2 …"""
    levels, z = fit.settings["levels"], fit.settings["scores"]
    return {v["label"]: float(i if z is None else z[i]) for i, v in enumerate(levels)}


def _known(span: dict[str, Any]) -> dict[str, Any]:
    value = span["lo"] if span["lo"] is not None else span["hi"]
    return {"value": value, "censoring": span["censoring"]}


def _model_rows(fit: Fit, places: dict[str, float], s_values: list[float]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if fit.rows[-1]["beta"] is None:
        return rows
    S = np.exp(np.linspace(math.log(s_values[0]), math.log(s_values[-1]), 9 if len(s_values) > 1 else 1))
    for label, place in places.items():
        eta50 = additive_eta50(fit, label, S)
        assert eta50 is not None
        base = {"definition": fit.definition, "level": label, "place": place}
        rows += [{**base, "layer": "model", "S": float(s), "value": float(v)} for s, v in zip(S, eta50, strict=True)]
        loss = fit.constants.get(f"loss_dex[{label}]")
        if loss is not None and loss.value is not None:
            lo, hi = (loss.interval.lo, loss.interval.hi) if loss.interval else (None, None)
            rows.append({**base, "layer": "additive", "value": loss.value, "lo": lo, "hi": hi})
    return rows


def draw(frame: pd.DataFrame) -> Figure:
    """Draw a row a definition: η50 over S (log₂ scales) at the left, loss over levels at the right."""
    with look():
        definitions = [d for d in TITLES if (frame["definition"] == d).any()]
        points = frame[frame["layer"].isin(("eta50", "loss")) & frame["censoring"].isin(DRAWN)]
        if not len(points):
            figure = new_figure(5, 1.5)
            empty(figure.subplots(), "no level has a frontier to show")
            return figure
        levels = list(dict.fromkeys(frame.sort_values("place", kind="stable")["level"]))
        s_values = sorted({float(s) for s in points["S"]})
        figure = new_figure(9.6, 0.9 + 3.2 * len(definitions))
        grid = figure.subplots(len(definitions), 2, squeeze=False, sharex="col")
        for (left, right), definition in zip(grid, definitions, strict=True):
            part = frame[frame["definition"] == definition]
            _frontiers(left, part, levels, s_values)
            _losses(right, part, levels, s_values)
            left.set_title(TITLES[definition])
            right.set_ylabel("loss of η50 (dex)")
            left.set_ylabel("η50 (log₂ scale)")
        grid[-1, 0].set_xlabel("staleness S (updates, log₂ scale)")
        grid[-1, 1].set_xlabel(f"{frame.attrs.get('axis', '')}{' (log scale)' if frame.attrs.get('sized') else ''}")
        figure.legend(handles=_legend(levels, s_values), loc="outside upper center", ncols=6, fontsize=7.5)
        return figure


def _frontiers(axes: Axes, part: pd.DataFrame, levels: list[str], s_values: list[float]) -> None:
    axes.grid(axis="y", lw=0.6)
    drawn = part[part["layer"].eq("eta50") & part["censoring"].isin(DRAWN)]
    rates = [float(v) for v in drawn["value"]]
    step = 0.24 / max(len(levels), 1)
    for i, (level, colour) in enumerate(zip(levels, shades(len(levels)), strict=True)):
        shift = (i - (len(levels) - 1) / 2) * step
        for row in drawn[drawn["level"] == level].to_dict("records"):
            ends = [None if v is None else math.log2(float(v)) for v in (row["lo"], row["hi"])]
            at = (math.log2(float(row["S"])) + shift, math.log2(float(row["value"])))
            _point(axes, at, ends, row["censoring"], colour, MARKERS[i % len(MARKERS)])
        line = part[part["layer"].eq("model") & part["level"].eq(level)]
        x, y = (np.log2(line[c].astype(float)) for c in ("S", "value"))
        axes.plot(x, y, color=colour, lw=1.3, ls=DASHED, zorder=1)
    log2_ticks(axes.xaxis, s_values)
    if rates:
        middle = [math.log2(v) for v in rates]
        axes.set_ylim(min(middle) - 1.2, max(middle) + 1.2)
        log2_ticks(axes.yaxis, [2.0**o for o in range(math.floor(min(middle)) - 1, math.ceil(max(middle)) + 2)])
        axes.set_ylim(min(middle) - 1.2, max(middle) + 1.2)


def _losses(axes: Axes, part: pd.DataFrame, levels: list[str], s_values: list[float]) -> None:
    axes.grid(axis="y", lw=0.6)
    axes.axhline(0, color=INK, lw=0.8, zorder=0.5)
    drawn = part[part["layer"].eq("loss") & part["censoring"].isin(DRAWN)]
    step = 0.3 / max(len(s_values), 1)
    for i, (s, colour) in enumerate(zip(s_values, shades(len(s_values)), strict=True)):
        shift = (i - (len(s_values) - 1) / 2) * step
        mine = drawn[drawn["S"].astype(float) == s].sort_values("place")
        x, y = mine["place"].astype(float) + shift, mine["value"].astype(float)
        axes.plot(x, y, color=colour, lw=0.9, zorder=1.5)
        for place, row in zip(x, mine.to_dict("records"), strict=True):
            ends = [None if v is None else float(v) for v in (row["lo"], row["hi"])]
            marker = MARKERS[i % len(MARKERS)]
            _point(axes, (float(place), float(row["value"])), ends, row["censoring"], colour, marker)
    for row in part[part["layer"] == "additive"].to_dict("records"):
        at = float(row["place"]) + 0.3
        ends = [None if v is None else float(v) for v in (row["lo"], row["hi"])]
        _point(axes, (at, float(row["value"])), ends, "none", INK, "_")
    places = part.drop_duplicates("level").set_index("level")["place"].astype(float)
    axes.set_xticks([places[v] for v in levels if v in places], [v for v in levels if v in places])
    axes.set_xlim(-0.5, float(places.max()) + 0.6)
    values = [0.0, *part[part["layer"].isin(("loss", "additive")) & part["value"].notna()]["value"].astype(float)]
    axes.set_ylim(min(values) - 0.35, max(values) + 0.35)


def _point(axes: Axes, at: tuple[float, float], ends: list[Any], censoring: str, colour: Any, marker: str) -> None:
    """A number with its interval; an arrow where it is only bounded. Unbounded ends run to the edge of the axes."""
    lo, hi = (v if v is not None else at[1] + far for v, far in zip(ends, (-99.0, 99.0), strict=True))
    axes.plot([at[0], at[0]], [lo, hi], color=colour, lw=1.2, zorder=2, scaley=False)
    shape = {"none": marker, "right": "^", "left": "v"}[censoring]
    face = colour if censoring == "none" else "white"
    size = 13 if shape == "_" else 5.5
    axes.plot([at[0]], [at[1]], ls="", marker=shape, ms=size, mfc=face, mec=colour, mew=1.1, zorder=3)


def _legend(levels: list[str], s_values: list[float]) -> list[Any]:
    style: dict[str, Any] = {"ls": "", "ms": 5.5}
    handles: list[Any] = [
        Line2D([], [], marker=MARKERS[i % len(MARKERS)], color=c, label=v, **style)
        for i, (v, c) in enumerate(zip(levels, shades(len(levels)), strict=True))
    ]
    handles += [
        Line2D([], [], marker=MARKERS[i % len(MARKERS)], color=c, lw=0.9, ms=5.5, label=f"S = {number(s)}")
        for i, (s, c) in enumerate(zip(s_values, shades(len(s_values)), strict=True))
    ]
    handles.append(Line2D([], [], color=MUTED, lw=1.3, ls=DASHED, label="additive model"))
    handles.append(Line2D([], [], marker="_", color=INK, ls="", ms=13, label="its loss"))
    handles.append(Line2D([], [], marker="^", mfc="white", mec=INK, label="at least (left: beyond the grid)", **style))
    return handles
