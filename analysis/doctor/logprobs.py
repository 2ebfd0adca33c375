"""Log-probs that are missing, or were not logged by the sampler but recomputed by the trainer."""

from __future__ import annotations

import numpy as np

from stalefront.analysis.doctor.base import Check, Found
from stalefront.analysis.doctor.records import Records, choices, injected
from stalefront.analysis.settings import DoctorSettings

RATIO = "theta_mu_logratio_mean"
SIZE = "mismatch_logratio_abs_mean"
# A sampler made to compute as the trainer does leaves log old/μ at exactly 0.
EXACT = "parity"


def look(records: Records, settings: DoctorSettings) -> Found | None:
    """θ/μ is null while a correction is on, or log old/μ is exactly 0 in every step of a cell with mismatch."""
    if not records.rows or records.trl:
        return None
    return _missing(records) or _recomputed(records)


def _missing(records: Records) -> Found | None:
    corrections = choices(records.cell, "correction")
    absent = int((~records.known[RATIO]).sum())
    if not corrections or RATIO not in records.named or not absent:
        return None
    evidence = f"θ/μ is null in {absent} of {records.rows} learner steps, with correction {', '.join(corrections)}"
    return Found(absent / records.rows, evidence, {"null_steps": absent, "steps": records.rows})


def _recomputed(records: Records) -> Found | None:
    active = [entry for entry in injected(records.cell) if entry.get("logged") != "raw"]
    names = [str(entry["choice"]) for entry in active]
    size = records.columns[SIZE]
    if not names or EXACT in records.injectors or not (records.has(SIZE) and bool(np.all(size == 0))):
        return None
    evidence = f"log old/μ is exactly 0 in all {records.rows} learner steps, with mismatch {', '.join(names)}"
    return Found(1.0, evidence, {"steps": records.rows, SIZE: 0.0})


CHECK = Check(
    name="log-probs",
    severity="problem",
    words="The sampler's log-probs are missing, or are the trainer's own: ratios to μ are not what they are taken for.",
    fix="Have the sampler return the log-prob of every sampled token, and hand that on instead of recomputing it.",
    look=look,
    needs=(RATIO, SIZE),
)
