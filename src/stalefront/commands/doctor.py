"""`stalefront doctor`: what is wrong between sampler and trainer, from the records of a sweep or of a cell."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stalefront.analysis.doctor.sweep import Examined, examine_directory
from stalefront.analysis.fits.base import finite
from stalefront.analysis.narrative import plural, say_finding
from stalefront.choice import OptionError

WELL, ILL = 0, 1


def doctor(directory: Path, *, as_json: bool = False) -> int:
    """Print what is found; returns 1 where that is something, 0 where it is nothing."""
    try:
        examined = examine_directory(directory)
    except FileNotFoundError as error:
        legal = "a sweep directory: a folder with a plan.json, or a cell's: one with a config.json"
        way_out = "Give the folder that python sweep.py wrote, for example runs/default."
        raise OptionError("DIR", str(directory), legal, way_out) from error
    except ValueError as error:
        way_out = f"{error}. Restore the file, or move the cell's directory away and run the sweep command again."
        raise OptionError("DIR", str(directory), "a directory whose files can be read", way_out) from error
    if as_json:
        print(json.dumps(finite(content(examined)), indent=1, ensure_ascii=False))
    else:
        print("\n".join(lines(examined)))
    return ILL if examined.diagnosis.findings else WELL


def content(examined: Examined) -> dict[str, Any]:
    """What `--json` prints: numbers that are not finite are null."""
    found = examined.diagnosis
    return {
        "format": 1,
        "name": examined.name,
        "cells": found.cells,
        "findings": [asdict(finding) for finding in found.findings],
        "unchecked": [asdict(gap) for gap in found.gaps],
    }


def lines(examined: Examined) -> list[str]:
    """A paragraph a finding, problems first, and what could not be checked."""
    found = examined.diagnosis
    text = [f"{examined.name}: {plural(found.cells, 'cell')}, {_counted(len(found.findings))}"]
    for finding in found.findings:
        words, evidence, fix = say_finding(finding, examined.labels)
        text += ["", f"{finding.severity} {finding.id}: {words}", f"  {evidence}", f"  Fix: {fix}"]
    if found.gaps:
        text += ["", "Could not be checked:"]
        text += [f"  {gap.id}: {gap.why} ({plural(gap.cells, 'cell')})" for gap in found.gaps]
    return text


def _counted(findings: int) -> str:
    return plural(findings, "finding") if findings else "nothing found"
