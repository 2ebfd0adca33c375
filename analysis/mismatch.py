"""The report's sections on mismatch as an axis: does its cost depend on S, and from which lag on does replay bias?

Both find their runs by themselves (``stalefront.analysis.axes``): a sweep without levels of such an axis, or without
the columns that replay records, has no section.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from stalefront.analysis.axes import NONE, Axis, find_axes, settings_of
from stalefront.analysis.figures import mismatch as mismatch_figure
from stalefront.analysis.figures import routing as routing_figure
from stalefront.analysis.fits.base import Constant, Fit, outcomes
from stalefront.analysis.fits.interaction import ADDITIVE, CHANGES, GROWS, OPEN, SHRINKS, fit_interaction
from stalefront.analysis.fits.replay_bias import COLUMNS, KEYS, fit_replay_bias
from stalefront.analysis.fits.seeds import draws_of
from stalefront.analysis.narrative import plural, rounded, show, show_ends
from stalefront.analysis.summary import Table, capped
from stalefront.analysis.tables import SweepTable
from stalefront.analysis.verdicts import DEFAULT
from stalefront.record import read_rows

DEFINITIONS = ("first_zero", DEFAULT)
WORDS = {
    ADDITIVE: "additive in log η: the loss is the same factor at every S",
    GROWS: "not additive: it grows with S",
    SHRINKS: "not additive: it shrinks with S",
    CHANGES: "not additive: it depends on S, but not in the same direction at every level",
    OPEN: "whether the loss depends on S cannot be told from these cells",
}
CAPTIONS = {
    "mismatch_cost": (
        "What mismatch costs the frontier",
        "Left: η50 over S, a line a level, each level fitted by itself, with its interval (arrows: beyond the grid); "
        "dashed: the additive model, in which every level shifts one line. Right: loss of η50 against the reference "
        "at each S, and (black) the loss of the additive model with its interval. One row a definition of collapse.",
    ),
    "routing": (
        "When replayed routes begin to bias",
        "Upper row: K3 between the learner under replayed routes and under its own; dotted: the mean K3 of old/μ "
        "without replay; triangles: the lag from which what age has added to the gap exceeds it. Middle: share of "
        "choices of experts that the present weights would make otherwise. Lower: K3 of θ/μ with and without replay. "
        "Means over seeds with their range, up to the first zero.",
    ),
}


@dataclass(frozen=True)
class Section:
    """One section of the report.

    Parameters
    ----------
    fits : list of Fit
    context : dict
        What ``mismatch.html.j2`` and ``mismatch.md.j2`` say; the figure is added by who draws it.
    figure : str
        Key of ``CAPTIONS`` and stem of the figure's files.
    module : module
        Draws ``frame``.
    frame : DataFrame
        What is drawn.
    """

    fits: list[Fit]
    context: dict[str, Any]
    figure: str
    module: Any
    frame: pd.DataFrame


def sections(sweep_dir: Path, sweep: SweepTable) -> list[Section]:
    """Every section that the runs of a sweep have something to say in, in a fixed order."""
    if not len(sweep.table):
        return []
    settings = settings_of(sweep_dir, sweep.table)
    axes = find_axes(settings, tuple(map(str, sweep.plan.get("axes") or {})))
    found = [interaction_section(sweep, axis) for axis in axes]
    replays = [axis for axis in axes if axis.group == "replay" and axis.key == "replay"]
    if replays:
        found.append(routing_section(sweep, replays, routing_rows(sweep_dir, sweep, replays)))
    return [section for section in found if section is not None]


def headline(section: Section) -> list[str]:
    """A sentence or two for a hurried reader."""
    if section.figure == "routing":
        return [f"{name}: {said[0]}" for name, said in section.context["said"]]
    fit = next(f for f in section.fits if f.definition == DEFAULT)
    arm = "" if fit.arm == "all" else f" ({fit.arm})"
    losses = [(k[len("loss_dex[") : -1], c) for k, c in fit.constants.items() if k.startswith("loss_dex")]
    last = f"at {losses[-1][0]} it loses {show_dex(losses[-1][1])}; " if losses else ""
    verdict = WORDS[fit.rows[-1]["verdict"]]
    return [f"What {fit.settings['axis']} costs the frontier{arm}, under {DEFAULT}: {last}{verdict}."]


def interaction_section(sweep: SweepTable, axis: Axis) -> Section | None:
    """What one axis costs the frontier; None where its runs have a single learning rate."""
    table, level = sweep.table, sweep.settings.level
    mine = table[table["arm"].isin([arm for _, arm in axis.levels])]
    if mine["lr"].nunique() < 2:
        return None
    draws = draws_of(sorted({s for s in mine["seed"] if s is not None}, key=lambda s: (str(type(s)), s)))
    fits = [
        fit_interaction(
            [(v, outcomes(table, definition, arm)) for v, arm in axis.levels],
            axis=axis.key,
            definition=definition,
            arm=axis.name or "all",
            level=level,
            draws=draws,
        )
        for definition in DEFINITIONS
    ]
    context = {
        "kind": "interaction",
        "title": f"What {axis.key} costs the frontier{': ' + axis.name if axis.name else ''}",
        "intro": f"Levels of {axis.key}, held against {axis.levels[0][0].label}. A loss is log₁₀ of the η50 of the "
        "reference over that of the level, in dex: 0.3 dex is half the learning rate.",
        "said": [(f.definition, say_interaction(f)) for f in fits],
        "table": loss_table(fits),
        "detail": level_table(fits),
    }
    return Section(fits, context, "mismatch_cost", mismatch_figure, mismatch_figure.data(fits))


def say_interaction(fit: Fit) -> list[str]:
    """Losses, then whether they depend on S."""
    n = f"n = {plural(fit.n, 'cell')}, {fit.n_events} collapsed, {fit.n - fit.n_events} right-censored at T"
    n += f", {plural(fit.n_undecided, 'cell')} left out as undecided" if fit.n_undecided else ""
    losses = {k[len("loss_dex[") : -1]: c for k, c in fit.constants.items() if k.startswith("loss_dex")}
    if not losses:
        return [f"No loss is fitted: {'; '.join(fit.notes)} ({n})."]
    first = "; ".join(f"{label}: {show_dex(c)}" for label, c in losses.items())
    against = f"Loss against {fit.settings['reference']}, if it is the same at every S"
    out = [f"{against}, with {fit.settings['level']:.0%} intervals: {first}; {n}."]
    changes = {k[len("change_dex[") : -1]: c for k, c in fit.constants.items() if k.startswith("change_dex")}
    words = WORDS[fit.rows[-1]["verdict"]]
    verdict = words[0].upper() + words[1:]
    if changes:
        each = "; ".join(f"{label}: {show_dex(c)}" for label, c in changes.items())
        where = next(iter(changes.values())).meaning.partition(" at S=")[2]
        out.append(f"{verdict}. {_tests(fit)} Change of the loss, at S={where}: {each}.")
    else:
        out.append(f"{verdict}.")
    if fit.rows[-1]["verdict"] == OPEN and changes:
        out.append(
            "No dependence on S is shown, but changes of more than a factor of two between the smallest and the "
            "largest S are not excluded either: more seeds would tell."
        )
    return [*out, *([f"Note: {'; '.join(fit.notes)}."] if fit.notes else [])]


def _tests(fit: Fit) -> str:
    p = f"Penalised likelihood ratio of no dependence on S: p = {show(fit.tests['p_all'])} over all levels"
    if "p_trend" in fit.tests:
        trend = show_dex(fit.constants["trend_dex"])
        p += f", p = {show(fit.tests['p_trend'])} for a trend in the level ({trend} for each decade), which decides"
    return f"{p}."


def show_dex(constant: Constant) -> str:
    """``0.31 dex [0.22, 0.4]``, or the side on which it is bounded."""
    ends = constant.interval
    if constant.value is not None:
        value = constant.value if ends is None else rounded(constant.value, ends)
        return f"{show(value)} dex {show_ends(ends) if ends else ''}".rstrip()
    if ends is None or (ends.lo is None and ends.hi is None):
        return "not identified (all runs ended alike)"
    return f"≥ {show(ends.lo)} dex" if ends.hi is None else f"≤ {show(ends.hi)} dex"


def loss_table(fits: list[Fit]) -> Table:
    """One row a level: loss of the additive model and its change over S, under both definitions."""
    labels = [v["label"] for v in fits[0].settings["levels"]]
    rows = []
    for label in labels:
        row = [label]
        for fit in fits:
            for name in ("loss_dex", "change_dex"):
                found = fit.constants.get(f"{name}[{label}]")
                row.append("reference" if label == labels[0] else "–" if found is None else show_dex(found))
        rows.append(row)
    head = [fits[0].settings["axis"], *(f"{n}, {f.definition}" for f in fits for n in ("loss", "change over S"))]
    caption = (
        "Loss of the additive model (≥, ≤: every run of the level or of the reference ended alike, so only a bound is "
        "known); change over S: loss at the largest S less that at the smallest, by the model that lets it change."
    )
    return capped(head, rows, caption)


def level_table(fits: list[Fit]) -> Table:
    """η50 and loss at each (level, S), every level fitted by itself."""
    rows = [
        [f.definition, r["level"], f"{r['S']:g}", _span(r["eta50"], r["eta50"]["outer"]), _loss(r["loss"])]
        for f in fits
        for r in f.rows
        if r["level"] is not None
    ]
    caption = "≥, ≤: beyond the grid on that side; brackets: intervals (…: unbounded)."
    return capped(["definition", "level", "S", "η50", "loss in dex"], rows, caption)


def _loss(loss: dict[str, Any] | None) -> str:
    return "–" if loss is None else _span(loss, [loss["outer_lo"], loss["outer_hi"]])


def _span(span: dict[str, Any], outer: list[float | None] | None) -> str:
    """A number with its interval, or its bound."""
    if span["censoring"] == "both":
        return "not identified"
    if span["censoring"] == "right":
        return f"≥ {show(span['lo'])}"
    if span["censoring"] == "left":
        return f"≤ {show(span['hi'])}"
    lo, hi = ("…" if v is None else show(v) for v in outer or (None, None))
    return f"{show(span['lo'])} [{lo}, {hi}]"


def routing_rows(sweep_dir: Path, sweep: SweepTable, axes: list[Axis]) -> pd.DataFrame:
    """Sums and counts of the columns of replay by run and whole lag, over the steps up to the first zero.

    Returns
    -------
    DataFrame
        ``KEYS``, ``setting``, and ``<name>_sum``, ``<name>_n`` for each of ``COLUMNS``. An absent value is not counted;
        one that is not finite is, and makes its sum so.
    """
    place = {arm: (axis.name, level.label) for axis in axes for level, arm in axis.levels}
    rows: list[dict[str, Any]] = []
    for cell in sweep.table[sweep.table["arm"].isin(place)].to_dict("records"):
        setting, replay = place[cell["arm"]]
        until = cell["first_zero_step_hi"] if cell["first_zero_event"] is True else None
        sums: dict[int, dict[str, float]] = {}
        # Of a step that was computed twice the last row counts, as everywhere.
        by_step = {row["step"]: row for row in read_rows(sweep_dir / "cells" / cell["cell_id"] / "steps.jsonl")}
        for step in by_step.values():
            lag = step.get("lag_mean_updates")
            if lag is None or lag != lag or (until is not None and step["step"] > until):
                continue
            mine = sums.setdefault(round(lag), {})
            for column, name in COLUMNS.items():
                value = step.get(column)
                mine[f"{name}_sum"] = mine.get(f"{name}_sum", 0.0) + (0.0 if value is None else float(value))
                mine[f"{name}_n"] = mine.get(f"{name}_n", 0) + (value is not None)
        keys = {"cell_id": cell["cell_id"], "replay": replay, "setting": setting}
        keys |= {k: cell[k] for k in ("S", "lr", "seed")}
        rows += [{**keys, "lag": lag, **sums[lag]} for lag in sorted(sums)]
    columns = [*KEYS, "setting", *(f"{n}_{what}" for n in COLUMNS.values() for what in ("sum", "n"))]
    return pd.DataFrame(rows, columns=columns)


def routing_section(sweep: SweepTable, axes: list[Axis], rows: pd.DataFrame) -> Section | None:
    """From which lag on replay biases, in every setting; None where no run measured the replay gap."""
    if not (rows["gap_n"] > 0).any():
        return None
    fits = []
    kinds = sorted({level.label for axis in axes for level, _ in axis.levels} - {NONE})
    for label, part in facets(rows):
        fits += [fit_replay_bias(part, replay=k, arm=label, level=sweep.settings.level) for k in kinds]
    context = {
        "kind": "routing",
        "title": "When replayed routes begin to bias",
        "intro": "The replay gap is the K3 between the learner under the routes it replays and under those it would "
        "choose now. It is held against the mismatch that replay is there to remove: the mean K3 of old/μ without it, "
        "at the same S, learning rate and flips.",
        "said": [(f"replay={k}", say_routing([f for f in fits if f.settings["replay"] == k])) for k in kinds],
        "table": routing_table(fits),
        "detail": None,
    }
    return Section(fits, context, "routing", routing_figure, routing_figure.data(facets(rows), fits))


def facets(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Rows of every setting, S and learning rate, each with a label that says what varies."""
    several = len(set(rows["lr"])) > 1
    out = []
    groups: Any = rows.groupby(["setting", "S", "lr"], sort=True)
    for (setting, s, lr), part in groups:
        said = [f"S={s}", *([f"η={show(float(lr))}"] if several else []), *([setting] if setting else [])]
        out.append((", ".join(said), part))
    return out


def say_routing(fits: list[Fit]) -> list[str]:
    """Where one kind of replay begins to bias: a sentence where there are few settings, else counts and the range."""
    known = [f for f in fits if "start_updates" in f.constants]
    if not known:
        return [f"Nothing to say: {'; '.join(sorted({n for f in fits for n in f.notes}))}."]
    if len(known) <= 4:
        return [f"{_setting(f)}: {reads_routing(f)}; n = {plural(f.n, 'run')}." for f in known]
    lags = [f.constants["start_updates"].value for f in known]
    some = [v for v in lags if v is not None]
    found = f"In {len(some)} of {plural(len(known), 'setting')} replay starts to bias within the lags of this grid"
    found += f", at lags from {show(min(some))} to {show(max(some))} updates" if some else ""
    return [f"{found}; the table has each with its interval."]


def reads_routing(fit: Fit) -> str:
    """``replay starts to bias at a lag of 6 updates [4, 9]``, or that it does not within the lags on record."""
    c = fit.constants
    if "start_updates" not in c:
        return "; ".join(fit.notes)
    start, ends = c["start_updates"].value, c["start_updates"].interval
    if start is None:
        grid = f"{show(c['lag_first_updates'].value)} to {show(c['lag_last_updates'].value)} updates"
        known = f"; {ends.kind}: from a lag of {show(ends.lo)} on" if ends is not None and ends.lo is not None else ""
        return f"replay does not start to bias within the lags of this grid ({grid}{known})"
    interval = ""
    if ends is not None:
        lo, hi = ("beyond the grid" if v is None else show(v) for v in (ends.lo, ends.hi))
        interval = f" [{lo}, {hi}], {ends.kind}"
    return f"replay starts to bias at a lag of {show(start)} updates{interval}"


def _setting(fit: Fit) -> str:
    return re.sub(r",? ?replay=[^,]*$", "", fit.arm) or "all runs"


def routing_table(fits: list[Fit]) -> Table:
    """One row a setting and kind of replay."""
    rows = []
    for fit in fits:
        c: dict[str, Constant] = fit.constants
        names = ("start_whole_updates", "removed_nats", "gap_first_nats", "gap_last_nats", "drift_last_frac")
        values = [show(c[n].value) if n in c else "–" for n in names]
        rows.append([_setting(fit), fit.settings["replay"], reads_routing(fit), *values, "; ".join(fit.notes) or "–"])
    head = ["setting", "replay", "reads as", "whole gap exceeds from", "mismatch without replay"]
    head += ["gap at the smallest lag", "gap at the largest lag", "route drift there", "remarks"]
    caption = (
        "K3 in nats per token, lags in updates. Replay starts to bias where what age has added to the gap since the "
        "smallest lag exceeds the mismatch without replay; beside it the lag from which the whole gap does (routes of "
        "the sampler have a gap at lag 0 already, which is the mismatch itself). –: at no lag on record."
    )
    return capped(head, rows, caption)
