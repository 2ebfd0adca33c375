"""A check of the doctor: one thing that can be wrong, how it shows in the records, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

from stalefront.analysis.doctor.records import Records
from stalefront.analysis.settings import DoctorSettings

Severity = Literal["problem", "notice"]


@dataclass(frozen=True)
class Found:
    """What a check found in one cell.

    Parameters
    ----------
    size : float
        How bad it is, to find the worst cell.
    evidence : str
        Numbers from the records, in words.
    numbers : mapping
        The same numbers by column or name.
    severity : str, optional
        Where it is not that of the check.
    """

    size: float
    evidence: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    severity: Severity | None = None


@dataclass(frozen=True)
class Check:
    """One thing that can be wrong.

    Parameters
    ----------
    name : str
        What the finding is called; docs/doctor.md has a section of that name.
    severity : str
        ``problem``: the numbers of the run aren't what they seem. ``notice``: worth knowing.
    words, fix : str
        What is wrong, and the way out.
    look : callable
        ``(Records, DoctorSettings) → Found | None``.
    needs : tuple of str
        Columns without any of which it can't be checked.
    optional : bool
        The columns are null in cells that cannot have it, which is no gap.
    injectable : bool
        A configured mismatch may be the cause.
    """

    name: str
    severity: Severity
    words: str
    fix: str
    look: Callable[[Records, DoctorSettings], Found | None]
    needs: tuple[str, ...] = ()
    optional: bool = False
    injectable: bool = False

    def gap(self, records: Records) -> str | None:
        """Why the check can't be made in this cell; None where it can, or where there is nothing to check."""
        if not self.needs or any(records.has(name) for name in self.needs):
            return None
        if records.trl:
            return "engine=trl does not record it"
        if not any(name in records.named for name in self.needs):
            return "the records, of an older version, lack it"
        return None if self.optional else "it was never measured"

    def applies(self, records: Records) -> bool:
        """Whether there is something to look at."""
        return not self.needs or any(records.has(name) for name in self.needs)


def severity_of(size: float, bound: float) -> Severity:
    """A problem above ``bound``, a notice up to it."""
    return "problem" if size > bound else "notice"


def critical_z(alpha: float) -> float:
    """Standard errors that a normal number exceeds, on either side, with probability ``alpha``."""
    return NormalDist().inv_cdf(1 - alpha / 2)
