"""Whether a finished cell collapsed, as the report says it."""

from __future__ import annotations

from pathlib import Path

from stalefront.analysis.fits.base import outcomes
from stalefront.analysis.tables import read_run


def has_collapsed(sweep_dir: Path, cell_id: str, verdict: str) -> bool | None:
    """What `verdict` says of a cell from its records; None where they cannot decide."""
    found = outcomes(read_run(sweep_dir, cell_id), verdict, arm="")["collapsed"].iloc[0]
    return None if found is None else bool(found)
