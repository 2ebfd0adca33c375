"""Sampler and trainer of a whole sweep: every step file read once, one cell in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stalefront.analysis.doctor import Diagnosis, Doctor
from stalefront.analysis.doctor.records import Json, Records, read_records
from stalefront.analysis.records import read_json, read_plan
from stalefront.analysis.settings import DoctorSettings
from stalefront.analysis.signature import Moments
from stalefront.labels import only, varying


@dataclass(frozen=True)
class Measured:
    """Numbers of one cell for the table of the report.

    Parameters
    ----------
    variance : tuple
        Σ over learner steps of tokens · (Var(log θ/μ), its part by mismatch, its part by lag); steps that are not
        finite are left out.
    flips : tuple
        Σ over rollout batches of tokens · share of flipped choices of experts, and of tokens.
    """

    cell_id: str
    moments: Moments
    variance: tuple[float, float, float]
    flips: tuple[float, float]


@dataclass(frozen=True)
class Examined:
    """A sweep or a cell: what was found, what was measured in every cell, and the cells' names for a reader."""

    name: str
    diagnosis: Diagnosis
    measured: tuple[Measured, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


def examine_directory(directory: Path, settings: DoctorSettings | None = None) -> Examined:
    """Examine a sweep directory, or the directory of one cell.

    Raises
    ------
    FileNotFoundError
        The directory is neither.
    ValueError
        A file that cannot be read; the message names it.
    """
    if (directory / "plan.json").is_file():
        planned: Json = read_plan(directory).get("cells") or {}
        cells = {cell_id: directory / "cells" / cell_id for cell_id in sorted(planned)}
    elif (directory / "config.json").is_file():
        planned, cells = {}, {directory.resolve().name: directory}
    else:
        raise FileNotFoundError(f"{directory} holds neither a sweep's plan.json nor a cell's config.json")
    doctor, measured = Doctor(settings or DoctorSettings(), len(cells)), []
    for records in _read(cells, planned):
        doctor.see(records)
        measured.append(measure(records))
    return Examined(directory.resolve().name, doctor.diagnosis(), tuple(measured), _labels(planned))


def _labels(planned: Json) -> dict[str, str]:
    """Cell → its id and the overrides that tell it from the others."""
    overrides = {cell_id: [str(text) for text in entry.get("overrides") or []] for cell_id, entry in planned.items()}
    keys = varying(list(overrides.values()))
    return {cell_id: " ".join([cell_id, *only(keys, given)]) for cell_id, given in overrides.items()}


def _read(cells: dict[str, Path], planned: Json) -> Iterator[Records]:
    for cell_id, folder in cells.items():
        (config, p1), (outcome, p2) = (read_json(folder / name) for name in ("config.json", "outcome.json"))
        if problem := p1 or p2:
            raise ValueError(f"{folder}: {problem}")
        cell = config.get("cell") or (planned.get(cell_id) or {}).get("cell") or {}
        try:
            yield read_records(folder / "steps.jsonl", cell_id, cell, outcome)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{folder / 'steps.jsonl'} holds a line that is not a step record ({error})") from error


def measure(records: Records) -> Measured:
    """Sums of one cell that can be added up over cells."""
    tokens, variance = records.columns["tokens"], records.columns["logratio_var_nats2"]
    parts = [variance, *(variance * records.columns[f"{name}_var_share"] for name in ("mismatch", "lag"))]
    ok = np.isfinite(parts).all(0) & (tokens > 0)
    sums = [float(tokens[ok] @ part[ok]) for part in parts]
    flips, batch = records.batches("expert_flip_frac"), records.batches("tokens")
    known = np.isfinite(flips) & (batch > 0)
    return Measured(
        records.cell_id,
        records.moments(),
        (sums[0], sums[1], sums[2]),
        (float(batch[known] @ flips[known]), float(batch[known].sum())),
    )


def share(part: float, whole: float) -> float:
    """``part/whole``; NaN of nothing."""
    return part / whole if whole else math.nan
