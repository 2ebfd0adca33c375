"""What a cell's directory says about it: the one reading of claim, status, outcome and steps that all parts share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stalefront.claims import Jobs, is_live, latest
from stalefront.files import read_json
from stalefront.paths import CellPaths

FINISHED = ("completed", "non-finite")

# A rate below .01 is excluded with 95 % confidence only after about this many samples without a pass: (1 − .01)^300 ≈
# .05.
HINT_SAMPLES = 300
# Step rows have about 2 kB; validation every 4 steps of 128 samples needs 12 of them. (measured)
TAIL_BYTES = 128 * 1024


@dataclass(frozen=True)
class Observed:
    """State of a cell now.

    Attributes
    ----------
    state : str
        planned, submitted, running, interrupted, completed, non-finite or failed.
    attempt : int
        Last attempt that anybody began; 0 for none.
    live : bool
        A process is at it.
    recorded : bool
        The last attempt has an outcome.
    host, job : str
        Where the last attempt runs or ran, and its Slurm job; empty where that is not known.
    """

    state: str
    attempt: int
    live: bool
    recorded: bool
    step: int
    steps: int
    reward_val: float | None
    started_utc: str
    reason: str
    host: str = ""
    job: str = ""

    @property
    def finished(self) -> bool:
        """True when there is nothing left to run."""
        return self.state in FINISHED


def observe(paths: CellPaths, jobs: Jobs | None = None) -> Observed:
    """Read the state of a cell. The claim is read first: what its owner wrote before it ended is then seen.

    `jobs` tells whether a Slurm job on another machine still runs.
    """
    claim = latest(paths)
    live = claim is not None and is_live(paths, claim, jobs)
    claimed = claim.attempt if claim else 0
    status = _read(paths.status)
    outcome = _read(paths.outcome)
    done = int(outcome.get("attempt") or 1) if outcome else 0
    current = status if int(status.get("attempt") or 0) == max(claimed, done) else {}
    recorded = bool(outcome) and done >= claimed
    # The outcome is the last thing that matters of a process that cannot be looked up.
    live = live and not (recorded and claim is not None and not claim.is_here)
    if recorded:
        state, reason = str(outcome["state"]), str(outcome.get("reason") or "")
    elif live:
        state, reason = "running", ""
    elif claim is not None:
        state, reason = "interrupted", "its process ended without a word"
    else:
        state, reason = str(status.get("state") or "planned"), str(status.get("reason") or "")
    return Observed(
        state=state,
        attempt=max(claimed, done),
        live=live,
        recorded=recorded,
        step=int(current.get("step") or outcome.get("last_step") or 0),
        steps=int(status.get("steps") or 0),
        reward_val=current.get("reward_val"),
        started_utc=str(current.get("started_utc") or ""),
        reason=reason,
        host=str(current.get("host") or outcome.get("host") or (claim.host if claim else "")),
        job=claim.job if claim and claimed >= done else str(outcome.get("job") or ""),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


class Tail(NamedTuple):
    """Last whole row of a step file (None for none), and whether nothing passed in its last validations."""

    last_step: int | None
    no_pass: bool


def read_tail(steps: Path) -> Tail:
    """Read the end of a step file.

    `no_pass` pools the last validation points until they hold `HINT_SAMPLES` samples. It is a hint for those who
    watch; whether a cell collapsed, and when, is decided by the analysis.
    """
    last_step, samples, passes = None, 0, 0
    for row in _rows_from_end(steps):
        last_step = int(row["step"]) if last_step is None else last_step
        samples += int(row.get("reward_val_n") or 0)
        passes += int(row.get("reward_val_passes") or 0)
        if samples >= HINT_SAMPLES:
            return Tail(last_step, passes == 0)
    return Tail(last_step, False)


def _rows_from_end(path: Path) -> Iterator[dict[str, Any]]:
    """Whole rows in the last `TAIL_BYTES`, the last one first."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return
    torn_first = 0 if size <= TAIL_BYTES else 1
    for line in reversed(lines[torn_first:]):
        if line.endswith(b"\n"):
            yield json.loads(line)
