"""`stalefront logs`: what a cell, or the Slurm job that had it, printed."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stalefront.choice import OptionError
from stalefront.claims import latest
from stalefront.commands.planned import Sweep
from stalefront.commands.snapshot import Look, Row, look_at_queue, take_snapshot
from stalefront.files import read_json
from stalefront.paths import CellPaths
from stalefront.slurm.batches import Batch, folder, read_batches

FOLLOW_EVERY_S = 0.5
# Between two looks at whether the cell still runs; Slurm is asked for cells of its jobs alone.
LOOK_EVERY_S = 5.0
# What `stalefront.worker.write_to_log` begins an attempt with.
BEGINS = re.compile(rb"^--- attempt (\d+), ", re.MULTILINE)


@dataclass(frozen=True)
class Log:
    """A log, or the part of it from `start` to `end` (None for all that is and comes)."""

    path: Path
    start: int = 0
    end: int | None = None


def logs(sweep: Sweep, cell_id: str, *, of_job: bool, attempt: int | None, lines: int | None, follow: bool) -> int:
    """Print a log below a line that says what it is."""
    row = take_snapshot(sweep, look_at_queue(sweep.paths), [cell_id]).rows[0]
    log = find_log(sweep, row, of_job=of_job, attempt=attempt)
    print(f"==> {log.path}: {describe(row)} <==", flush=True)
    with log.path.open("rb") as file:
        file.seek(log.start)
        content = file.read() if log.end is None else file.read(log.end - log.start)
        kept = content if lines is None else b"".join(content.splitlines(keepends=True)[-lines:] if lines else [])
        _write(kept)
        if follow and log.end is None and row.seen.live:
            for more in appended(sweep, cell_id, log.path, file.tell()):
                _write(more)
            print(f"==> {describe(take_snapshot(sweep, look_at_queue(sweep.paths), [cell_id]).rows[0])} <==")
    return 0


def describe(row: Row) -> str:
    """State of a cell in a line."""
    step = f" at step {row.seen.step}" if row.seen.attempt else ""
    attempt = f", attempt {row.seen.attempt}" if row.seen.attempt else ""
    return f"cell {row.cell_id} is {row.state}{step}{attempt}" + (f": {row.reason}" if row.reason else "")


def find_log(sweep: Sweep, row: Row, *, of_job: bool, attempt: int | None) -> Log:
    """The log that is asked for: the cell's own unless its job died before there was one."""
    cell = sweep.paths.cell(row.cell_id)
    if of_job:
        return _required(sweep, row, job_log(sweep, row.cell_id, attempt), "a cell that had a Slurm job with a log")
    if attempt is not None:
        legal = f"an attempt that wrote a log: 1 to {row.seen.attempt}" if row.seen.attempt else "none: it never began"
        log = attempt_log(cell, attempt) or job_log(sweep, row.cell_id, attempt)
        if log is None:
            raise OptionError("--attempt", attempt, legal, "Leave it out for the last one.")
        return log
    # The end of a job that never began the cell is written down as an attempt that nobody claimed.
    began = not row.seen.attempt or cell.claim(row.seen.attempt).exists()
    own = Log(cell.log) if cell.log.is_file() else None
    found = own if own is not None and began else job_log(sweep, row.cell_id, None) or own
    return _required(sweep, row, found, "a cell that has begun")


def _required(sweep: Sweep, row: Row, log: Log | None, legal: str) -> Log:
    if log is None:
        way_out = f"It is {row.state}" + (f": {row.reason}" if row.reason else "")
        raise OptionError("CELL", row.cell_id, legal, f"{way_out}. See stalefront status {sweep.paths.root}.")
    return log


def attempt_log(cell: CellPaths, attempt: int) -> Log | None:
    """The part of a cell's log, or of one that was set aside, that an attempt wrote."""
    kept = sorted((cell.root / "attempts").glob("*/log*.txt"))
    for path in [cell.log, *kept]:
        content = path.read_bytes() if path.is_file() else b""
        marks = [(int(found[1]), found.start()) for found in BEGINS.finditer(content)]
        for place, (number, start) in enumerate(marks):
            if number == attempt:
                return Log(path, start, marks[place + 1][1] if place + 1 < len(marks) else None)
    return None


def job_log(sweep: Sweep, cell_id: str, attempt: int | None) -> Log | None:
    """Log of the Slurm job that had an attempt, or the last one; None where there is none."""
    holders = [batch for batch in read_batches(sweep.paths, closed=True) if any(cell_id in job for job in batch.cells)]
    wanted = _job_of(sweep.paths.cell(cell_id), attempt)
    for batch in reversed(holders):
        for key, index in batch.numbers().items():
            asked_for = key == wanted if wanted else attempt is None and cell_id in batch.cells[index]
            path = _log_path(sweep, batch, key)
            if asked_for and path.is_file():
                return Log(path)
    return None


def _job_of(cell: CellPaths, attempt: int | None) -> str:
    """Job of an attempt by its claim or by the outcome that speaks for it; empty where the newest batch decides."""
    if attempt is None:
        claim, outcome = latest(cell), read_json(cell.outcome) or {}
        last = claim.attempt if claim is not None else 0
        if int(outcome.get("attempt") or 0) > last:
            return str(outcome.get("job") or "")
        return claim.job if claim is not None else ""
    stored = read_json(cell.claim(attempt)) or read_json(cell.attempt(attempt) / cell.outcome.name) or {}
    outcome = read_json(cell.outcome) or {}
    return str(stored.get("job") or (outcome.get("job") if outcome.get("attempt") == attempt else "") or "")


def _log_path(sweep: Sweep, batch: Batch, key: str) -> Path:
    # As submitit names it; the scripts of a dry run say the same.
    return folder(sweep.paths, batch.name) / f"{key}_0_log.out"


def appended(sweep: Sweep, cell_id: str, path: Path, position: int) -> Iterator[bytes]:
    """What is written to the log from `position` on, until the cell no longer runs."""
    looked, runs = time.monotonic(), True
    look = Look((), None, 0.0)
    while True:
        # The last look comes before the last reading, so that last words are read.
        with path.open("rb") as file:
            file.seek(position)
            more = file.read()
        position += len(more)
        if more:
            yield more
        elif not runs:
            return
        if time.monotonic() - looked >= (LOOK_EVERY_S if look.queue is not None else 2 * FOLLOW_EVERY_S):
            look = look_at_queue(sweep.paths)
            runs = take_snapshot(sweep, look, [cell_id]).rows[0].seen.live
            looked = time.monotonic()
        if runs:
            time.sleep(FOLLOW_EVERY_S)


def _write(content: bytes) -> None:
    sys.stdout.write(content.decode("utf-8", errors="replace"))
    sys.stdout.flush()
