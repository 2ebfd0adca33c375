"""The report's section on mismatch: plain data for the templates, None where there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from stalefront.analysis.doctor.sweep import Examined, Measured, share
from stalefront.analysis.narrative import plural, say_finding, show
from stalefront.analysis.settings import DoctorSettings
from stalefront.analysis.signature import pooled, signature
from stalefront.analysis.summary import Table, capped

HEAD = ["arm", "S", "cells", "tokens", "mean |log old/μ|", "K1", "K3", "mean old/μ − 1", "signature"]
HEAD += ["variance of log θ/μ by mismatch", "by lag"]
FLIPS = "flipped choices of experts"
CAPTION = (
    "Over the tokens of every rollout batch, the sampling weights by the trainer's forward (old) against what the "
    "sampler reported (μ). Variances over all learner steps. – : not recorded."
)


def section(examined: Examined, table: pd.DataFrame, settings: DoctorSettings) -> dict[str, Any] | None:
    """Table by arm and S, and the findings; None without a mismatch beyond rounding and without a finding."""
    beyond = any(m.moments.abs_mean > settings.signature.rounding_nats for m in examined.measured)
    findings = examined.diagnosis.findings
    if not beyond and not findings:
        return None
    return {
        "table": mismatch_table(examined.measured, table, settings),
        "findings": [{"id": f.id, "severity": f.severity, "words": say_finding(f, examined.labels)} for f in findings],
        "gaps": [f"{gap.id}: {gap.why} ({plural(gap.cells, 'cell')})" for gap in examined.diagnosis.gaps],
    }


def mismatch_table(measured: Sequence[Measured], table: pd.DataFrame, settings: DoctorSettings) -> Table:
    """One row for the cells of an arm and an S that have any record of old/μ."""
    by_cell = {m.cell_id: m for m in measured if m.moments.n}
    known = table[table["cell_id"].isin(list(by_cell))]
    groups: Any = known.assign(S=known["S"].map(_label)).groupby(["arm", "S"], sort=False)
    members = {key: [by_cell[cell_id] for cell_id in group["cell_id"]] for key, group in groups}
    routed = any(m.flips[1] for m in by_cell.values())
    rows = [[*map(str, key), *_row(cells, settings, routed=routed)] for key, cells in members.items()]
    return capped([*HEAD, *([FLIPS] if routed else [])], rows, CAPTION)


def _label(s: object) -> str:
    return "–" if s is None else str(s)


def _row(cells: list[Measured], settings: DoctorSettings, *, routed: bool) -> list[str]:
    moments = pooled([m.moments for m in cells])
    variance, mismatch, lag = (math.fsum(m.variance[part] for m in cells) for part in range(3))
    flips = share(math.fsum(m.flips[0] for m in cells), math.fsum(m.flips[1] for m in cells))
    numbers = [moments.abs_mean, moments.k1, moments.k3, moments.excess]
    return [
        str(len(cells)),
        str(moments.n),
        *map(_text, numbers),
        signature(moments, settings.signature).kind,
        _text(share(mismatch, variance)),
        _text(share(lag, variance)),
        *([_text(flips)] if routed else []),
    ]


def _text(value: float) -> str:
    return show(None if math.isnan(value) else value)
