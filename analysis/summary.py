"""Tables of the report, computed from the run table; no figure is drawn and no text is formatted for one medium."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from stalefront.analysis.fits.base import Constant, Fit
from stalefront.analysis.fits.regime import REGIMES
from stalefront.analysis.narrative import plural, show, slope_of, with_interval
from stalefront.analysis.settings import Json
from stalefront.analysis.tables import SweepTable
from stalefront.analysis.verdicts import DEFAULT, KINDS

# Wording of the kinds for readers: reaching the horizon is censoring, not proof of stability.
KIND_TEXT = {
    "stable": "did not collapse within T",
    "collapsed for good": "collapsed for good",
    "touched zero and recovered": "touched zero and recovered",
    "undecided": "undecided",
}
KIND_MEANING = {
    "stable": "reached its last step T without a zero window; it may still collapse later (right-censored at T)",
    "collapsed for good": "fell to zero and stayed there to the end of the run, or its parameters became non-finite",
    "touched zero and recovered": "had at least one zero window, and its last window is shown to be above zero",
    "undecided": "missing, failed, unfinished, or too few samples or passes to tell",
}
DONE = ("completed", "non-finite")
# Assumed: what tells a run that came back from one that flickers just above zero. It decides no verdict.
RECOVERED_SHARE = 0.5
MAX_ROWS = 60
# An interval end further away than this factor tells a reader no more than that there is none.
FAR = 1e4
# Settings named in "what was run" when all cells share them; the others are listed below it.
NAMED_SETTINGS = (
    "model.choice",
    "task.choice",
    "delay.choice",
    "loss.choice",
    "loss.beta",
    "correction.choice",
    "optimizer.kind",
    "optimizer.warmup_steps",
    "engine.choice",
    "device",
    "validation.num_samples",
    "validation.every",
)


@dataclass(frozen=True)
class Table:
    """A table of ready text: column heads, rows, a caption, and how many rows were cut."""

    head: list[str]
    rows: list[list[str]]
    caption: str = ""
    cut: int = 0
    numeric: list[int] = field(default_factory=list)


def capped(head: list[str], rows: list[list[str]], caption: str = "", most: int = MAX_ROWS) -> Table:
    """Make a table of at most ``most`` rows that says how many it leaves out."""
    return Table(head, rows[:most], caption, max(0, len(rows) - most))


def kinds_table(table: pd.DataFrame) -> Table:
    """How many cells are of each kind."""
    found = table["kind"].value_counts()
    dead = int((table["end"] == "non-finite").sum())
    extra = {"collapsed for good": f" ({dead} non-finite)"} if dead else {}
    recovered = table[table["kind"] == "touched zero and recovered"]
    if len(recovered):
        share = recovered["final_window_reward"].astype(float) / recovered["reward_start"].astype(float)
        high = int((share >= RECOVERED_SHARE).sum())
        extra["touched zero and recovered"] = (
            f"; {high} of {len(recovered)} ended with at least {RECOVERED_SHARE:.0%} of the reward they started with"
        )
    rows = [[KIND_TEXT[k], str(int(found.get(k, 0))), KIND_MEANING[k] + extra.get(k, "")] for k in KINDS]
    return Table(["kind", "cells", "meaning"], rows)


def states_text(table: pd.DataFrame) -> str:
    """Counts by state, in words."""
    found = table["state"].value_counts()
    return ", ".join(f"{int(found[s])} {s}" for s in sorted(found.index, key=lambda s: (s not in DONE, s)))


def unfinished_table(table: pd.DataFrame) -> Table:
    """Cells that are not finished, with their state and reason."""
    rows = [
        [
            r["cell_id"],
            r["arm"],
            str(r["S"]),
            show(r["lr"]),
            str(r["seed"]),
            r["state"],
            progress(r),
            r["reason"] or "–",
        ]
        for r in table[~table["state"].isin(DONE)].to_dict("records")
    ]
    return capped(["cell", "arm", "S", "η", "seed", "state", "last step", "reason"], rows)


def progress(row: dict[Any, Any]) -> str:
    """Last step of a cell out of its horizon."""
    return f"{'–' if row['last_step'] is None else row['last_step']} of {row['steps']}"


def why_undecided(table: pd.DataFrame) -> str:
    """The most common reason why cells are undecided, with its count; for tables in which none is decided."""
    reasons = table.apply(_undecided_because, axis=1)
    found = reasons.value_counts()
    reason = min(found.index, key=lambda text: (-int(found[text]), text))
    text = f"No cell is decided. {'The' if len(found) == 1 else 'The most common'} reason, in {int(found[reason])} of "
    text += f"{plural(len(table), 'cell')}: {reason}."
    no_window = table[(reasons == reason) & table["state"].isin(DONE)]["final_window_samples"].isna()
    if len(no_window) and no_window.all():
        text += " Raise validation.num_samples, lower validation.every, or run more learner steps."
    return text


def _undecided_because(row: pd.Series[Any]) -> str:
    """Reason of one undecided cell: its state where it has not finished, else what the default definition says."""
    if row["state"] not in DONE:
        return f"the cell is {row['state']}" + (f" ({row['reason']})" if row["reason"] else "")
    reason = json.loads(row[f"{DEFAULT}_evidence"]).get("reason") or f"it ended early ({row['end']})"
    return str(reason).removeprefix("undecidable: ")


def differing_table(table: pd.DataFrame) -> Table:
    """Cells that the two definitions judge differently: touched zero, but did not remain there."""
    first, strict = table["first_zero_event"], table[f"{DEFAULT}_event"]
    rows = []
    for r in table[(first == True) & (strict == False)].to_dict("records"):  # noqa: E712  (object columns with None)
        touched = f"({r['first_zero_step_lo']}, {r['first_zero_step_hi']}]"
        rows.append(
            [
                str(r["S"]),
                show(r["lr"]),
                str(r["seed"]),
                touched,
                str(r["dwell_steps"]),
                str(r["n_dips"]),
                f"{r['final_window_passes']} of {r['final_window_samples']}",
                show(r["reward_start"]),
            ]
        )
    head = [
        "S",
        "η",
        "seed",
        "first at zero, in steps",
        "longest stay",
        "visits",
        "passes in the last window",
        "reward at the start",
    ]
    return capped(head, rows)


def lag_table(table: pd.DataFrame) -> Table:
    """Asked staleness against the lag that the records realised."""
    rows = []
    known = table[table["S"].notna() & table["lag_mean_updates"].notna()]
    found: Any = known.groupby(["S_kind", "S"], sort=True)
    for key, group in found:
        mean = group["lag_mean_updates"].astype(float)
        most = group["lag_max_updates"].dropna().astype(float)
        asked = int(key[1]) - 1
        # A run that ended before its first batch was used up could not yet show the largest lag.
        long_enough = most[group["last_step"].astype(int) >= int(key[1])]
        agrees = "–" if long_enough.empty else ("yes" if (long_enough == asked).all() else "no")
        rows.append(
            [
                str(key[0]),
                str(key[1]),
                str(asked),
                show(float(mean.mean())),
                "–" if most.empty else show(float(most.max())),
                agrees,
                str(len(group)),
            ]
        )
    head = [
        "delay",
        "S",
        "largest lag asked",
        "mean lag realised",
        "largest realised",
        "as asked in every cell",
        "cells",
    ]
    return Table(head, rows, "Lags in updates; means over learner steps, then over cells.")


def regime_table(table: pd.DataFrame) -> Table:
    """Regimes per S, with the means of the numbers that decide."""
    rows = []
    for s, group in table[table["S"].notna()].groupby("S", sort=True):
        found = group["regime"].value_counts()
        columns = ("cos_refresh", "cos_within", "growth_exponent")
        means = [show(finite_mean(group[c])) for c in columns]
        rows.append([str(s), *[str(int(found.get(r, 0))) for r in REGIMES], *means])
    head = ["S", *REGIMES, "cosine at refresh", "cosine within cycle", "growth exponent"]
    return Table(head, rows, "Cells per regime; means over the cells where the number could be measured.")


def finite_mean(column: pd.Series[Any]) -> float | None:
    """Mean of the finite values of a column, None if it has none."""
    values = pd.to_numeric(column).to_numpy(dtype=np.float64)
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def eta_max_table(fits: dict[tuple[str, str], Fit]) -> Table:
    """η_max brackets per S under the two headline definitions, seeds pooled."""
    rows = []
    for definition in ("first_zero", DEFAULT):
        fit, products = fits[("eta_max", definition)], fits[("s_eta", definition)]
        surface = fits[("firth", definition)].constants
        by_s = {r["S"]: r for r in products.rows}
        for row in [r for r in fit.rows if r["seed"] is None]:
            product = by_s[row["S"]]
            rows.append(
                [
                    definition,
                    f"{row['S']:g}",
                    _bracket(row, "conservative"),
                    _bracket(row, "optimistic"),
                    _bracket(product, "conservative"),
                    _short(surface.get(f"eta50[S={row['S']:g}]")),
                    str(row["inversions"]),
                    f"{row['n']} ({row['n_seeds']})",
                ]
            )
    head = ["definition", "S", "η_max, conservative", "η_max, optimistic", "S·η_max, conservative", "η50 by the fit"]
    head += ["inversions", "cells (seeds)"]
    caption = (
        "Conservative: from the largest η below the first collapse of any seed to that collapse. Optimistic: from the "
        "largest η that any seed survives to the next collapse. ≥ and < mark grids that end before the frontier. "
        "η50: half the runs collapse there, by the penalised logistic fit, with its profile interval (…: more "
        "than ten thousand times away, or unbounded)."
    )
    return Table(head, rows, caption)


def _short(constant: Constant | None) -> str:
    """Value and interval without words, for a narrow column."""
    if constant is None or constant.value is None or constant.interval is None:
        return "–"
    far = (constant.value / FAR, constant.value * FAR)
    ends = (constant.interval.lo, constant.interval.hi)
    lo, hi = (show(v) if v is not None and far[0] <= v <= far[1] else "…" for v in ends)
    return f"{show(constant.value)} [{lo}, {hi}]"


def _bracket(row: dict[str, Any], rule: str) -> str:
    lo, hi = row[f"{rule}_lo"], row[f"{rule}_hi"]
    if lo is None and hi is None:
        return "–"
    if hi is None:
        return f"≥ {show(lo)}"
    return f"< {show(hi)}" if lo is None else f"[{show(lo)}, {show(hi)})"


def definitions_table(fits: dict[tuple[str, str], Fit], definitions: list[str]) -> Table:
    """One row a collapse definition: how many collapsed, the slope and the constants."""
    rows = []
    for name in definitions:
        if ("firth", name) not in fits:
            continue
        firth, t_eta = fits[("firth", name)], fits[("t_eta", name)]
        text, judgement = slope_of(firth, fits.get(("s_eta", name)))
        rows.append(
            [
                name,
                f"{firth.n_events} of {firth.n}",
                text,
                judgement.tag,
                with_interval(firth.constants.get("S_eta50")),
                with_interval(t_eta.constants.get("t_eta")),
            ]
        )
    head = ["definition", "collapsed", "slope of the frontier", "reads as", "S·η50 (if slope is −1)", "t·η at collapse"]
    return Table(head, rows)


def arms_table(fits: dict[str, dict[tuple[str, str], Fit]], table: pd.DataFrame) -> Table:
    """One row an arm under the default definition."""
    rows = []
    for arm in fits:
        firth = fits[arm][("firth", DEFAULT)]
        text, judgement = slope_of(firth, fits[arm].get(("s_eta", DEFAULT)))
        found = table[table["arm"] == arm]["kind"].value_counts()
        rows.append([arm, *[str(int(found.get(k, 0))) for k in KINDS], text, judgement.tag])
    return Table(["arm", *[KIND_TEXT[k] for k in KINDS], "slope of the frontier", "reads as"], rows)


def provenance(sweep: SweepTable) -> list[tuple[str, str]]:
    """Who computed what: versions, commits, machines and time, from the outcomes."""
    table = sweep.table
    out = []
    for label, column in (("commit", "commit"), ("device", "device_name")):
        found = _counted(table[column])
        if found:
            out.append((label, found))
    dirty = int((table["dirty"] == True).sum())  # noqa: E712  (object column with None)
    if dirty:
        out.append(("uncommitted changes", f"in {dirty} cell(s)"))
    versions = _counted(table["versions"].map(_versions))
    if versions:
        out.append(("versions", versions))
    for label, column in (("wall time", "wall_s"), ("CPU time", "cpu_s")):
        seconds = table[column].dropna().astype(float)
        if len(seconds):
            text = f"{show(float(seconds.sum()))} s over {len(seconds)} cells, median {show(float(seconds.median()))} s"
            out.append((label, text))
    return out


def _versions(text: object) -> str | None:
    return ", ".join(f"{k} {v}" for k, v in json.loads(text).items()) if isinstance(text, str) else None


def _counted(column: pd.Series[Any]) -> str:
    """Distinct values; with counts where there is more than one."""
    found = column.dropna().astype(str).value_counts()
    names: list[str] = sorted(found.index)
    if len(names) == 1:
        return names[0]
    return "; ".join(f"{n} ({int(found[n])} cells)" for n in names)


def noted(table: pd.DataFrame) -> Table:
    """Warnings of the runs and remarks on their records, with counts."""
    rows: list[list[str]] = []
    for column, label in (("warnings", "warning"), ("record_notes", "record")):
        found = table[column].dropna().value_counts()
        rows.extend([label, str(text), str(int(found[text]))] for text in sorted(found.index))
    return capped(["what", "text", "cells"], rows)


def named_settings(fixed: Json) -> list[tuple[str, str]]:
    """The settings a reader asks for first, where all cells share them."""
    return [(k, str(fixed[k])) for k in NAMED_SETTINGS if k in fixed]


def axes_rows(plan: Json) -> list[tuple[str, str]]:
    """Axes of the sweep as planned."""
    axes = plan.get("axes") or {}
    return [(str(k), ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for k, v in axes.items()]
