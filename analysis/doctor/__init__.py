"""What is wrong between sampler and trainer, from the records alone: one file a finding, and their list.

``CHECKS`` are in the order in which they are worth reading. Every rollout batch counts once, by its first learner step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from stalefront.analysis.doctor import (
    experts,
    fallback,
    inert,
    kv,
    logprobs,
    raw,
    retokenised,
    sampler,
    temperature,
    truncated,
    version,
)
from stalefront.analysis.doctor.base import Check, Found, Severity
from stalefront.analysis.doctor.records import Records
from stalefront.analysis.settings import DoctorSettings

CHECKS: tuple[Check, ...] = (
    *(logprobs.CHECK, version.CHECK, retokenised.CHECK, kv.CHECK),
    *(truncated.CHECK, raw.CHECK, temperature.CHECK),
    *(sampler.CHECK, experts.CHECK, fallback.CHECK, inert.CHECK),
)
UNUSED = "it has no learner step yet"


@dataclass(frozen=True)
class Finding:
    """What a check found in ``cells`` of the ``checked`` cells; the evidence is that of the ``worst`` one."""

    id: str
    severity: Severity
    words: str
    evidence: str
    fix: str
    cells: int
    checked: int
    worst: str
    numbers: dict[str, float]


@dataclass(frozen=True)
class Gap:
    """A check that could not be made in ``cells`` cells, and why."""

    id: str
    cells: int
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """Findings, problems first, and what could not be checked."""

    cells: int
    findings: tuple[Finding, ...]
    gaps: tuple[Gap, ...]


@dataclass
class Doctor:
    """Looks at one cell after another and keeps no records: `see` each, then `diagnosis`.

    Parameters
    ----------
    cells : int
        How many there will be; the chance of a false alarm is for all of them together.
    """

    settings: DoctorSettings
    cells: int
    found: dict[str, list[tuple[str, Found]]] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    gaps: dict[tuple[str, str], int] = field(default_factory=dict)

    def see(self, records: Records) -> None:
        """Make every check in one cell."""
        settings = dataclasses.replace(self.settings, alpha=self.settings.alpha / max(self.cells, 1))
        for check in CHECKS:
            gap = check.gap(records) if records.rows else UNUSED
            if gap is not None:
                self.gaps[check.name, gap] = self.gaps.get((check.name, gap), 0) + 1
            if gap is None and check.applies(records):
                self.checked[check.name] = self.checked.get(check.name, 0) + 1
                found = check.look(records, settings)
                if found is not None:
                    self.found.setdefault(check.name, []).append((records.cell_id, _configured(check, records, found)))

    def diagnosis(self) -> Diagnosis:
        """What was found in all cells seen."""
        findings = [self._finding(check) for check in CHECKS if check.name in self.found]
        findings.sort(key=lambda finding: finding.severity != "problem")
        order = [check.name for check in CHECKS]
        gaps = [Gap(name, count, why) for (name, why), count in self.gaps.items()]
        gaps.sort(key=lambda gap: (order.index(gap.id), gap.why))
        return Diagnosis(self.cells, tuple(findings), tuple(gaps))

    def _finding(self, check: Check) -> Finding:
        """One line for all cells: the worst is the first of the largest."""
        every = self.found[check.name]
        worst, most = max(every, key=lambda entry: entry[1].size)
        severities = {found.severity or check.severity for _, found in every}
        severity: Severity = "problem" if "problem" in severities else "notice"
        counts = (len(every), self.checked[check.name])
        return Finding(check.name, severity, check.words, most.evidence, check.fix, *counts, worst, dict(most.numbers))


def _configured(check: Check, records: Records, found: Found) -> Found:
    """The finding, with the mismatch that the cell asks for."""
    if not check.injectable or not records.injectors:
        return found
    return dataclasses.replace(found, evidence=f"{found.evidence}; configured mismatch: {', '.join(records.injectors)}")


def examine(every: Iterable[Records], cells: int, settings: DoctorSettings | None = None) -> Diagnosis:
    """Diagnosis of ``cells`` cells."""
    doctor = Doctor(settings or DoctorSettings(), cells)
    for records in every:
        doctor.see(records)
    return doctor.diagnosis()
