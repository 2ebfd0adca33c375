"""Corrections that never acted."""

from __future__ import annotations

from stalefront.analysis.doctor.base import Check, Found
from stalefront.analysis.doctor.records import Records, inert
from stalefront.analysis.settings import DoctorSettings

GROUP = "correction."


def look(records: Records, settings: DoctorSettings) -> Found | None:
    """The outcome says so."""
    names = [name.removeprefix(GROUP) for name in inert(records.warnings) if name.startswith(GROUP)]
    if not names:
        return None
    evidence = f"{', '.join(names)} changed no weight and rejected no token in {records.rows} learner steps"
    return Found(len(names), evidence, {"steps": records.rows})


CHECK = Check(
    name="inert-correction",
    severity="notice",
    words="A correction never acted: this cell is the same as one without it.",
    fix="Check its bounds and its anchor: on-policy, or without mismatch, there is nothing to correct.",
    look=look,
)
