"""Replay gap, route drift and θ/μ against the lag: a line a kind of replay, a column a setting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stalefront.analysis.figures.style import (
    DASHES,
    INK,
    MARKERS,
    MUTED,
    empty,
    look,
    new_figure,
    shades,
    thin,
    wrap_title,
)
from stalefront.analysis.fits.base import Fit

COLUMNS = ("layer", "setting", "replay", "lag", "mean", "lo", "hi", "n", "n_seeds")
PANELS = {
    "gap": "replay gap\n(K3, nats/token)",
    "drift": "route drift\n(share of choices)",
    "theta_mu": "θ/μ\n(K3, nats/token)",
}
LOG = ("gap", "theta_mu")
MAX_SETTINGS = 8
# A K3 below this is a zero of float32 arithmetic and has no place on a log axis.
FLOOR = 1e-12


def data(facets: list[tuple[str, pd.DataFrame]], fits: list[Fit]) -> pd.DataFrame:
    """What the figure shows, of at most eight settings (evenly thinned).

    Parameters
    ----------
    facets : list of (str, DataFrame)
        Label and rows of every setting (``fits.replay_bias``).
    fits : list of Fit
        ``replay_bias`` of the same settings.

    Returns
    -------
    DataFrame
        ``layer`` is ``gap``, ``drift`` or ``theta_mu`` (a row a replay and lag: mean over the steps of all seeds,
        smallest and largest mean of a seed, steps ``n``), ``removed`` (``mean`` of old/μ without replay) or ``start``
        (``lag`` with the interval ``lo`` to ``hi``; absent = beyond the grid). Means that are not finite stay so.
    """
    kept = thin(facets, MAX_SETTINGS)
    rows: list[dict[str, Any]] = []
    for label, part in kept:
        for name in PANELS:
            rows += _lines(label, part, name)
        mine = [f for f in fits if f.arm == f"{label}, replay={f.settings['replay']}" and f.constants]
        for fit in mine:
            base = {"setting": label, "replay": fit.settings["replay"]}
            start, removed = fit.constants["start_updates"], fit.constants["removed_nats"].value
            ends = start.interval
            rows.append({**base, "layer": "removed", "mean": removed})
            interval = {"lo": ends.lo if ends else None, "hi": ends.hi if ends else None}
            rows.append({**base, "layer": "start", "lag": start.value, **interval})
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    cut = len(kept) < len(facets)
    frame.attrs["note"] = f"To stay readable, {len(kept)} of {len(facets)} settings are drawn." if cut else ""
    return frame


def _lines(label: str, part: pd.DataFrame, name: str) -> list[dict[str, Any]]:
    """Mean of one quantity at each lag, and the range over seeds."""
    measured = part[part[f"{name}_n"] > 0]
    rows = []
    groups: Any = measured.groupby(["replay", "lag"], sort=True)
    for (replay, lag), group in groups:
        total, n = (group[f"{name}_{what}"].to_numpy(dtype=np.float64) for what in ("sum", "n"))
        seeds = pd.DataFrame({"seed": group["seed"].to_numpy(), "total": total, "n": n}).groupby("seed", dropna=False)
        means = np.array([seed["total"].to_numpy().sum() / seed["n"].to_numpy().sum() for _, seed in seeds])
        rows.append(
            {
                "layer": name,
                "setting": label,
                "replay": replay,
                "lag": lag,
                "mean": float(total.sum() / n.sum()),
                "lo": float(means.min()),
                "hi": float(means.max()),
                "n": int(n.sum()),
                "n_seeds": len(means),
            }
        )
    return rows


def draw(frame: pd.DataFrame) -> Figure:
    """Draw a column a setting and a row a quantity; the scales of a row are shared."""
    with look():
        settings = list(dict.fromkeys(frame["setting"]))
        layers = [name for name in PANELS if (frame["layer"] == name).any()]
        if not layers:
            figure = new_figure(5, 1.5)
            empty(figure.subplots(), "no step measured what replay changes")
            return figure
        width = min(max(1.6 + 1.9 * len(settings), 5.0), 14.0)
        figure = new_figure(width, 1.1 + 1.9 * len(layers))
        grid = figure.subplots(len(layers), len(settings), sharex=True, sharey="row", squeeze=False)
        kinds = sorted({r for r in frame["replay"].dropna()}, key=lambda r: (r != "none", r))
        look_of = {
            r: (c, DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])
            for i, (r, c) in enumerate(zip(kinds, shades(len(kinds)), strict=True))
        }
        for j, setting in enumerate(settings):
            part = frame[frame["setting"] == setting]
            for i, name in enumerate(layers):
                _panel(grid[i, j], part, name, look_of)
            grid[0, j].set_title(wrap_title(setting, 16), loc="center", fontsize=8)
        for i, name in enumerate(layers):
            grid[i, 0].set_ylabel(PANELS[name], fontsize=8)
            if name in LOG and (pd.to_numeric(frame[frame["layer"] == name]["mean"]) > FLOOR).any():
                grid[i, 0].set_yscale("log")
        for axes in grid.flat:
            axes.label_outer(remove_inner_ticks=True)
        figure.supxlabel("realised lag (updates)", fontsize=9)
        figure.legend(handles=_legend(look_of), loc="outside upper center", ncols=6, fontsize=8)
        return figure


def _panel(axes: Axes, part: pd.DataFrame, name: str, look_of: dict[Any, tuple[Any, Any, str]]) -> None:
    axes.tick_params(labelsize=7)
    axes.grid(axis="y", lw=0.5)
    for replay, line in part[part["layer"] == name].groupby("replay", sort=True):
        colour, dash, marker = look_of[replay]
        lag, mean = line["lag"].astype(float), line["mean"].to_numpy(dtype=np.float64)
        # Zero gaps have no logarithm: the line begins where there is one.
        shown = np.where(mean > FLOOR, mean, np.nan) if name in LOG else mean
        axes.plot(lag, shown, color=colour, ls=dash, lw=1.3, marker=marker, ms=3)
        lo, hi = (np.where(line[c].astype(float) > 0, line[c].astype(float), np.nan) for c in ("lo", "hi"))
        axes.fill_between(lag, lo, hi, color=colour, alpha=0.15, lw=0)
        bad = ~np.isfinite(mean)
        if bad.any():
            axes.plot(lag[bad], np.full(int(bad.sum()), 0.97), ls="", marker="x", color=colour, ms=4,
                      transform=axes.get_xaxis_transform())  # fmt: skip
    if name != "gap":
        return
    for removed in sorted(set(part[part["layer"] == "removed"]["mean"].dropna())):
        if math.isfinite(removed):
            axes.axhline(float(removed), color=INK, lw=1.0, ls=":")
    for row in part[(part["layer"] == "start") & part["lag"].notna()].to_dict("records"):
        colour = look_of[row["replay"]][0]
        style: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": colour}
        axes.plot([float(row["lag"])], [0.04], ls="", marker="^", ms=6, **style)
        ends = [row["lo"], row["hi"]]
        if any(e is not None for e in ends):
            axes.plot([float(row["lag"]) if e is None else float(e) for e in ends], [0.04, 0.04], lw=1.4, **style)


def _legend(look_of: dict[Any, tuple[Any, Any, str]]) -> list[Any]:
    handles: list[Any] = [
        Line2D([], [], color=c, ls=d, marker=m, ms=4, label=f"replay={r}") for r, (c, d, m) in look_of.items()
    ]
    handles.append(Line2D([], [], color=INK, ls=":", label="old/μ without replay"))
    handles.append(Line2D([], [], color=MUTED, ls="", marker="^", label="starts to bias"))
    return handles
