"""The run table: one row a *planned* cell, whatever became of it, and the thinned curves that figures draw.

Each ``steps.jsonl`` is read once; verdicts and regime are computed from all its rows, then only what figures need is
kept, so that a sweep of ten thousand cells fits in memory.
"""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from stalefront.analysis.arms import Arm, describe_arms
from stalefront.analysis.fits.regime import RegimeCall
from stalefront.analysis.records import CellFiles, Json, Steps, read_cell, read_plan, read_steps
from stalefront.analysis.settings import ReportSettings, arm_labels, fixed_settings, staleness
from stalefront.analysis.verdicts import Curve, RemainsZero, Verdict, kind_of
from stalefront.analysis.verdicts.base import FloatArray, pool

MISSING = "missing"
COSINE_BINS = 32
CURVE_COLUMNS = ("step", "reward", "n", "passes")
COSINE_COLUMNS = ("step", "within", "n_within", "refresh", "n_refresh")

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class SweepTable:
    """A sweep as the analysis sees it.

    Parameters
    ----------
    table : DataFrame
        One row a planned cell, sorted by arm, S, learning rate, seed, cell_id.
    curves : DataFrame
        ``cell_id, step, reward, n, passes``: validation points, thinned for drawing.
    cosines : DataFrame
        ``cell_id, step, within, n_within, refresh, n_refresh``: means over bins of learner steps.
    plan : dict
        The ``sweep`` entry of plan.json (name, question, axes).
    fixed : dict
        Dotted settings that all cells share.
    settings : ReportSettings
        What decided.
    arms : dict
        What the label of an arm stands for.
    """

    table: pd.DataFrame
    curves: pd.DataFrame
    cosines: pd.DataFrame
    plan: Json
    fixed: Json
    settings: ReportSettings
    arms: dict[str, Arm] = field(default_factory=dict)


def build_table(sweep_dir: Path, settings: ReportSettings | None = None) -> SweepTable:
    """Read a sweep directory into its run table.

    Parameters
    ----------
    sweep_dir : Path
        Directory with ``plan.json`` and ``cells/``.
    settings : ReportSettings, optional
        Verdict definitions, reward column and thresholds; defaults as documented there.

    Returns
    -------
    SweepTable

    Raises
    ------
    FileNotFoundError
        No ``plan.json``.
    ValueError
        A file that cannot be what the contract says it is; the message names file, line and way out.
    """
    settings = settings or ReportSettings()
    plan = read_plan(sweep_dir)
    planned: dict[str, Json] = plan.get("cells") or {}
    rows: list[Json] = []
    curves: list[Columns] = []
    cosines: list[Columns] = []
    files = [read_cell(sweep_dir, cell_id, planned[cell_id]) for cell_id in sorted(planned)]
    asked = frozenset(str(o).lstrip("+~").split("=")[0] for p in planned.values() for o in p.get("overrides") or [])
    arms = arm_labels({f.cell_id: f.cell for f in files}, asked)
    for cell in files:
        steps = read_steps(cell.directory / "steps.jsonl", settings.reward)
        row, curve = _row(cell, steps, settings)
        rows.append({"cell_id": cell.cell_id, "arm": arms[cell.cell_id], **row})
        curves.append(_thin_curve(curve, settings.max_points))
        cosines.append(_thin_cosine(steps))
    table = _sorted(pd.DataFrame(rows, dtype=object))
    fixed = fixed_settings({f.cell_id: f.cell for f in files})
    ids = [f.cell_id for f in files]
    drawn = (_stack(ids, curves, CURVE_COLUMNS), _stack(ids, cosines, COSINE_COLUMNS))
    described = describe_arms({f.cell_id: f.cell for f in files}, arms)
    return SweepTable(table, *drawn, plan.get("sweep") or {}, fixed, settings, described)


def read_run(sweep_dir: Path, cell_id: str, settings: ReportSettings | None = None) -> pd.DataFrame:
    """Row of one cell in the run table, from its files alone; its arm is not known and left empty."""
    files = read_cell(sweep_dir, cell_id, {})
    settings = settings or ReportSettings()
    row, _ = _row(files, read_steps(files.directory / "steps.jsonl", settings.reward), settings)
    return pd.DataFrame([{"cell_id": cell_id, "arm": "", **row}], dtype=object)


def write_table(table: pd.DataFrame) -> bytes:
    """CSV of a table, the same bytes for the same table: floats by repr, empty for absent, ``nan`` for NaN."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.itertuples(index=False, name=None):
        writer.writerow([_text(v) for v in row])
    return out.getvalue().encode("utf-8")


def _text(value: Any) -> str:
    if value is None or value is pd.NA:
        return ""
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (float, np.floating)):
        return repr(float(value))
    return str(value)


def _row(files: CellFiles, steps: Steps, settings: ReportSettings) -> tuple[Json, Curve]:
    """Everything the table says about one cell, and its full curve."""
    cell = files.cell
    s, kind = staleness(cell)
    state, reason = _state(files)
    horizon = int(cell.get("steps") or 0)
    last = int(steps.step[-1]) if len(steps.step) else None
    curve = _curve(steps, horizon=horizon, state=state)
    verdicts = {d.name: d(curve) for d in settings.definitions}
    lr_sum = np.cumsum(np.where(np.isnan(steps.lr_applied), 0.0, steps.lr_applied))
    row: Json = {
        "state": state,
        "reason": reason or None,
        "S": s,
        "S_kind": kind,
        "lr": _number((cell.get("optimizer") or {}).get("lr")),
        "seed": cell.get("seed"),
        "steps": horizon,
        "last_step": last,
        "kind": kind_of(curve, verdicts["first_zero"], verdicts["remains_zero"]),
        "end": curve.end,
        "lr_sum_end": float(lr_sum[-1]) if len(lr_sum) else None,
        "lag_mean_updates": _finite_mean(steps.lag_mean),
        "lag_max_updates": float(np.nanmax(steps.lag_max)) if np.isfinite(steps.lag_max).any() else None,
        **_rewards(curve, _window_samples(settings)),
        "reward_last_third": _late_reward(curve),
        **_acted(steps),
        **_zero_fields(verdicts["first_zero"]),
    }
    for name, verdict in verdicts.items():
        row.update(_verdict_fields(name, verdict, curve, steps, lr_sum))
    row.update(_regime_fields(_regime(steps, lr_sum, verdicts["first_zero"], settings)))
    row.update(_outcome_fields(files, steps))
    return row, curve


def _state(files: CellFiles) -> tuple[str, str]:
    """State of a cell and why: from the outcome, unless claim or status tell of a later attempt.

    A status stays ``running`` when its process is killed; that nobody runs the cell is then seen from the claim.
    """
    status, outcome = files.status, files.outcome
    notes = list(files.problems)
    attempt = status.get("attempt") or 0
    if outcome.get("state") and (outcome.get("attempt") or 0) >= max(attempt, files.claimed):
        text = outcome.get("reason") or _last_line(outcome.get("error"))
        return str(outcome["state"]), "; ".join([*([str(text)] if text else []), *notes])
    if files.claimed > attempt or (files.claimed and status.get("state") == "running"):
        state, why = ("running", []) if files.live else ("interrupted", ["its process ended without a word"])
        return state, "; ".join([*why, *notes])
    if status.get("state"):
        return str(status["state"]), "; ".join([*([str(status["reason"])] if status.get("reason") else []), *notes])
    if files.directory.is_dir():
        return "planned", "; ".join(["not started yet", *notes])
    return MISSING, "; ".join(["no directory: never started, or moved away", *notes])


def _last_line(text: object) -> str:
    lines = str(text).strip().splitlines() if text else []
    return lines[-1] if lines else ""


def _curve(steps: Steps, *, horizon: int, state: str) -> Curve:
    """Validation points of a run and the way it ended."""
    last = int(steps.step[-1]) if len(steps.step) else 0
    end = state
    if state == "completed":
        end = "horizon" if last >= horizon else "stopped"
    keep = steps.measured
    passes = np.clip(steps.passes[keep], 0, steps.samples[keep])
    return Curve(steps.step[keep], steps.samples[keep], passes, steps.reward[keep], horizon, last, end)


def _window_samples(settings: ReportSettings) -> int:
    """Samples that the default definition pools before it judges."""
    return next(int(d.min_samples) for d in settings.definitions if isinstance(d, RemainsZero))


def _rewards(curve: Curve, min_samples: int) -> Json:
    """Reward at the first, last and highest point (single points, not pooled), and passes of the last full window."""
    n = len(curve.steps)
    finite = np.isfinite(curve.reward)
    pooled = pool(curve, min_samples)
    return {
        "final_window_passes": int(pooled.passes[-1]) if len(pooled) else None,
        "final_window_samples": int(pooled.samples[-1]) if len(pooled) else None,
        "final_window_reward": float(pooled.reward[-1]) if len(pooled) else None,
        "reward_start": float(curve.reward[0]) if n else None,
        "reward_final": float(curve.reward[-1]) if n else None,
        "reward_peak": float(curve.reward[finite].max()) if finite.any() else None,
        "reward_points": n,
        "reward_points_non_finite": int(n - finite.sum()),
        "n_per_point": float(np.median(curve.samples)) if n else None,
    }


def _late_reward(curve: Curve) -> float | None:
    """Mean reward over the points of the last third of the horizon, weighted by samples; None unless it was reached."""
    late = curve.steps * 3 > 2 * curve.horizon
    if curve.end != "horizon" or not late.any():
        return None
    return float(np.average(curve.reward[late], weights=curve.samples[late]))


def _acted(steps: Steps) -> Json:
    """The largest share clipped, share masked and distance of a weight from 1 in any step; None if never recorded."""
    columns = {"clip_frac_max": steps.clip, "mask_frac_max": steps.masked, "weight_off_max": steps.weight_off}
    return {name: None if np.isnan(v).all() else float(np.nanmax(v)) for name, v in columns.items()}


def _zero_fields(first_zero: Verdict) -> Json:
    evidence = first_zero.evidence
    return {
        "t_last_zero": evidence.get("t_last_zero"),
        "dwell_steps": evidence.get("dwell_steps"),
        "n_dips": evidence.get("n_dips"),
        "recovered": evidence.get("recovered"),
    }


def _verdict_fields(name: str, verdict: Verdict, curve: Curve, steps: Steps, lr_sum: FloatArray) -> Json:
    """Event interval in learner steps and in Σ lr; where there is no event, the step it is right-censored at."""
    censored = verdict.event is not True and len(steps.step) > 0
    return {
        f"{name}_event": verdict.event,
        f"{name}_step_lo": verdict.step_lo,
        f"{name}_step_hi": verdict.step_hi,
        f"{name}_lr_sum_lo": _lr_sum_at(steps, lr_sum, verdict.step_lo),
        f"{name}_lr_sum_hi": _lr_sum_at(steps, lr_sum, verdict.step_hi),
        f"{name}_censor_step": curve.end_step if censored else None,
        f"{name}_censor_reason": curve.end if censored else None,
        f"{name}_evidence": json.dumps(verdict.evidence, sort_keys=True),
    }


def _lr_sum_at(steps: Steps, lr_sum: FloatArray, step: int | None) -> float | None:
    """Σ of the applied learning rate over the updates up to and including ``step``."""
    if step is None:
        return None
    index = int(np.searchsorted(steps.step, step, side="right")) - 1
    return float(lr_sum[index]) if index >= 0 else 0.0


def _regime(steps: Steps, lr_sum: FloatArray, first_zero: Verdict, settings: ReportSettings) -> RegimeCall:
    """Regime from the rows up to the first zero: afterwards the gradient vanishes and the run stands still."""
    until = first_zero.step_hi if first_zero.event else None
    rows = np.ones(len(steps.step), dtype=np.bool_) if until is None else steps.step <= until
    return settings.regime(
        dist=steps.dist[rows], lr_sum=lr_sum[rows], cos_grad=steps.cos_grad[rows], at_refresh=steps.at_refresh[rows]
    )


def _regime_fields(call: RegimeCall) -> Json:
    return {
        "regime": call.regime,
        "regime_reason": call.reason,
        "cos_refresh": call.cos_refresh,
        "n_refresh": call.n_refresh,
        "cos_within": call.cos_within,
        "n_within": call.n_within,
        "cos_non_finite": call.n_non_finite,
        "growth_exponent": call.exponent,
        "n_exponent": call.n_exponent,
    }


def _outcome_fields(files: CellFiles, steps: Steps) -> Json:
    outcome = files.outcome
    versions = outcome.get("versions") or {}
    return {
        "attempt": outcome.get("attempt", files.status.get("attempt")),
        "resumed_from_step": outcome.get("resumed_from_step"),
        "wall_s": _number(outcome.get("wall_s")),
        "cpu_s": _number(outcome.get("cpu_s")),
        "host": outcome.get("host"),
        "device_name": outcome.get("device_name"),
        "commit": outcome.get("commit"),
        "dirty": outcome.get("dirty"),
        "versions": json.dumps(versions, sort_keys=True) if versions else None,
        "warnings": "; ".join(str(w) for w in outcome.get("warnings") or []) or None,
        "record_notes": "; ".join(steps.notes) or None,
    }


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _finite_mean(values: FloatArray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    """Sort by arm, S, lr, seed, cell_id, absent values last."""
    if table.empty:
        return table
    keys = []
    for index, row in enumerate(table[["arm", "S", "lr", "seed", "cell_id"]].itertuples(index=False, name=None)):
        arm, s, lr, seed, cell_id = row
        number = seed if isinstance(seed, int) else math.inf
        keys.append((arm, math.inf if s is None else s, math.inf if lr is None else lr, number, cell_id, index))
    return table.iloc[[k[-1] for k in sorted(keys)]].reset_index(drop=True)


def _stack(ids: list[str], parts: list[Columns], names: tuple[str, ...]) -> pd.DataFrame:
    """One frame from the columns of every cell, led by its cell_id."""
    lengths = [len(p[names[0]]) for p in parts]
    columns = {name: np.concatenate([p[name] for p in parts] or [np.zeros(0)]) for name in names}
    return pd.DataFrame({"cell_id": np.repeat(np.array(ids, dtype=object), lengths), **columns})


def _thin_curve(curve: Curve, max_points: int) -> Columns:
    """At most ``max_points`` validation points, evenly spaced, first and last always among them."""
    n = len(curve.steps)
    keep = np.unique(np.linspace(0, n - 1, min(n, max_points)).round().astype(np.int64))
    columns = (curve.steps, curve.reward, curve.samples, curve.passes)
    return {name: column[keep] for name, column in zip(CURVE_COLUMNS, columns, strict=True)}


def _thin_cosine(steps: Steps) -> Columns:
    """Mean cosine of consecutive applied gradients in equal bins of learner steps, by where in the cycle."""
    known = np.isfinite(steps.cos_grad)
    edges = np.linspace(0, int(steps.step[-1]) + 1 if len(steps.step) else 1, COSINE_BINS + 1)
    where = np.digitize(steps.step, edges) - 1
    columns: Columns = {"step": (edges[:-1] + edges[1:]) / 2}
    for name, rows in (("within", known & ~steps.at_refresh), ("refresh", known & steps.at_refresh)):
        count = np.bincount(where[rows], minlength=COSINE_BINS)
        total = np.bincount(where[rows], weights=steps.cos_grad[rows], minlength=COSINE_BINS)
        columns[name] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        columns[f"n_{name}"] = count
    measured = (columns["n_within"] + columns["n_refresh"]) > 0
    return {name: column[measured] for name, column in columns.items()}
