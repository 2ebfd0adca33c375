"""Read the files of one sweep directory (``docs/data_flow.md``); nothing is interpreted here.

Non-finite tokens stay non-finite, ``null`` stays absent, and a torn last line of ``steps.jsonl`` (a run killed in the
middle of a write, or still writing) is left out and counted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stalefront.analysis.verdicts.base import BoolArray, FloatArray, IntArray
from stalefront.claims import is_live, latest
from stalefront.paths import CellPaths

Json = dict[str, Any]


@dataclass(frozen=True)
class CellFiles:
    """What the small files of one planned cell say; ``attempt`` files of earlier attempts are not read.

    ``claimed`` is the newest attempt that a process has claimed (0 for none), ``live`` whether that process may run.
    """

    cell_id: str
    cell: Json
    directory: Path
    status: Json
    outcome: Json
    problems: tuple[str, ...]
    claimed: int = 0
    live: bool = False


@dataclass(frozen=True)
class Steps:
    """The columns of one ``steps.jsonl`` that the analysis uses; NaN where a value is absent or not a number.

    Arrays have shape (R,), one entry a row in order of learner step. ``measured`` marks rows with a validation
    result, which is how an absent value is told from a NaN one. ``clip``, ``masked`` and ``weight_off`` say what a
    method did in a step: the share of tokens a clip stopped, the share corrections removed, and how far a correction
    weight was from 1 (of the mean and the smallest, the larger).
    """

    step: IntArray
    lr_applied: FloatArray
    lag_mean: FloatArray
    lag_max: FloatArray
    dist: FloatArray
    cos_grad: FloatArray
    at_refresh: BoolArray
    reward: FloatArray
    samples: IntArray
    passes: IntArray
    measured: BoolArray
    clip: FloatArray
    masked: FloatArray
    weight_off: FloatArray
    torn: int = 0
    repeated: int = 0
    notes: tuple[str, ...] = field(default=())


def read_json(path: Path) -> tuple[Json, str | None]:
    """Read one JSON object; an absent file is empty, an unreadable one is empty with the problem stated."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return {}, f"{path.name} is not readable JSON ({error})"
    return (loaded, None) if isinstance(loaded, dict) else ({}, f"{path.name} does not hold a JSON object")


def read_plan(sweep_dir: Path) -> Json:
    """Read ``plan.json``.

    Raises
    ------
    FileNotFoundError
        If the directory holds no ``plan.json``.
    ValueError
        If the file isn't readable, or is of another format.
    """
    path = sweep_dir / "plan.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: a sweep directory holds plan.json and cells/; "
            "give the directory that `python sweep.py -m` wrote, e.g. runs/<sweep name>"
        )
    plan, problem = read_json(path)
    if problem is not None:
        raise ValueError(f"{sweep_dir}: {problem}; restore plan.json or run the sweep command again to rewrite it")
    if plan.get("format") != 1:
        raise ValueError(f"{path}: format={plan.get('format')!r}, this version reads format 1")
    return plan


def read_cell(sweep_dir: Path, cell_id: str, planned: Json) -> CellFiles:
    """Read the small files of a planned cell; the plan's copy of it stands in for a directory that is gone."""
    directory = sweep_dir / "cells" / cell_id
    config, p1 = read_json(directory / "config.json")
    status, p2 = read_json(directory / "status.json")
    outcome, p3 = read_json(directory / "outcome.json")
    cell = config.get("cell") or planned.get("cell") or {}
    problems = tuple(p for p in (p1, p2, p3) if p is not None)
    paths = CellPaths(directory)
    claim = latest(paths)
    live = claim is not None and is_live(paths, claim)
    return CellFiles(cell_id, cell, directory, status, outcome, problems, claim.attempt if claim else 0, live)


def read_steps(path: Path, reward: str) -> Steps:
    """Read ``steps.jsonl`` once and keep the columns the analysis uses.

    Parameters
    ----------
    path : Path
        The file; an absent one gives zero rows.
    reward : str
        Reward column, ``reward_val`` or ``reward_train``; its ``_n`` and ``_passes`` come with it.
    """
    by_step: dict[int, Json] = {}
    repeated = 0
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    rows, torn = _parse(path, [line for line in lines if line.strip()])
    for row in rows:
        repeated += int(row["step"]) in by_step
        by_step[int(row["step"])] = row
    ordered = [by_step[s] for s in sorted(by_step)]
    notes = []
    if torn:
        notes.append("torn last line left out")
    if repeated:
        notes.append(f"{repeated} repeated steps, the last of each kept")
    return _columns(ordered, reward, torn, repeated, tuple(notes))


def _parse(path: Path, lines: list[bytes]) -> tuple[list[Json], int]:
    """Parse the lines; only the last may be torn."""
    rows: list[Json] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                return rows, 1
            raise ValueError(
                f"{path}: line {number} of {len(lines)} is not a step record ({error}); only the last line may be "
                "torn: restore the file, or move the cell's directory away and run the sweep command again"
            ) from error
    return rows, 0


def _columns(rows: list[Json], reward: str, torn: int, repeated: int, notes: tuple[str, ...]) -> Steps:
    def floats(name: str) -> FloatArray:
        return np.array([np.nan if r.get(name) is None else float(r[name]) for r in rows], dtype=np.float64)

    samples = floats(f"{reward}_n")
    measured = np.array([r.get(reward) is not None for r in rows], dtype=np.bool_) & (samples > 0)
    # A policy that cannot be sampled passes nothing: an absent or NaN count beside a measured reward is no pass.
    passes = np.nan_to_num(floats(f"{reward}_passes"), nan=0.0)
    return Steps(
        step=np.array([r["step"] for r in rows], dtype=np.int64),
        lr_applied=floats("lr_applied"),
        lag_mean=floats("lag_mean_updates"),
        lag_max=floats("lag_max_updates"),
        dist=floats("dist_from_start"),
        cos_grad=floats("cos_grad"),
        at_refresh=np.array([bool(r.get("at_refresh")) for r in rows], dtype=np.bool_),
        reward=floats(reward),
        samples=np.nan_to_num(samples, nan=0.0).astype(np.int64),
        passes=passes.astype(np.int64),
        measured=measured,
        clip=np.fmax(floats("clip_low_frac"), floats("clip_high_frac")),
        masked=floats("mask_frac"),
        weight_off=np.fmax(np.abs(floats("weight_mean") - 1), np.abs(floats("weight_min") - 1)),
        torn=torn,
        repeated=repeated,
        notes=notes,
    )
