"""Collapse definitions, one file each: curve → verdict. They disagree on purpose; every report shows several.

To add one: a file here with a frozen dataclass (thresholds as fields, ``name`` = file stem, ``sentence``,
``__call__``), one entry below, one table of cases in ``tests/analysis/verdicts/``.
"""

from __future__ import annotations

from stalefront.analysis.verdicts.base import Curve, Definition, Verdict
from stalefront.analysis.verdicts.below_start import BelowStart
from stalefront.analysis.verdicts.first_zero import FirstZero
from stalefront.analysis.verdicts.half_peak import HalfPeak
from stalefront.analysis.verdicts.remains_zero import RemainsZero

__all__ = [
    "DEFAULT",
    "KINDS",
    "BelowStart",
    "Curve",
    "Definition",
    "FirstZero",
    "HalfPeak",
    "RemainsZero",
    "Verdict",
    "default_definitions",
    "kind_of",
]

DEFAULT = "remains_zero"

KINDS = ("stable", "collapsed for good", "touched zero and recovered", "undecided")


def default_definitions() -> tuple[Definition, ...]:
    """Every definition with its default thresholds, ``first_zero`` and ``remains_zero`` first."""
    return (FirstZero(), RemainsZero(), HalfPeak(), BelowStart())


def kind_of(curve: Curve, first_zero: Verdict, remains_zero: Verdict) -> str:
    """Which of the three kinds a run is, or ``undecided``.

    ``stable`` means *did not collapse within the horizon*: it is given only to a run that reached it, and is a
    right-censored observation, not a proof of stability.
    """
    if remains_zero.event:
        return "collapsed for good"
    if first_zero.event and remains_zero.event is False:
        return "touched zero and recovered"
    if first_zero.event is False and curve.end == "horizon":
        return "stable"
    return "undecided"
