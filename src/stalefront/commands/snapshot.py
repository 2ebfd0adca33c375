"""One look at every cell of a sweep: its own files, and Slurm's queue where jobs of it may be there."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stalefront.claims import latest, launcher_runs
from stalefront.commands.planned import Sweep
from stalefront.observe import Observed, observe
from stalefront.paths import CellPaths, SweepPaths
from stalefront.slurm.batches import Batch, numbered, read_batches
from stalefront.slurm.queue import Queue, QueuedJob, queue_text, read_queue

# What needs a look comes first.
STATES = ("failed", "interrupted", "running", "submitted", "planned", "non-finite", "completed")
# A claim this much older than a look at the queue, or younger, may be of a job that the look found still waiting;
# clocks of nodes differ by about that much. (assumed)
YOUNG_S = 10.0


@dataclass(frozen=True)
class Look:
    """What Slurm said about the open batches of a sweep.

    Attributes
    ----------
    batches : sequence of Batch
        Open ones, with their number where it is known.
    queue : Queue or None
        None when it is not known, or when nobody has to be asked.
    taken : float
        When, in seconds since the epoch.
    problem : str
        Why the queue is not known though jobs may be in it; else empty.
    """

    batches: Sequence[Batch]
    queue: Queue | None
    taken: float
    problem: str = ""

    def jobs(self) -> Iterator[tuple[Batch, int, QueuedJob]]:
        """(batch, index, job) of every job of this sweep that is in the queue."""
        if self.queue is not None:
            for batch in self.batches:
                for key, index in batch.numbers().items():
                    if key in self.queue.jobs:
                        yield batch, index, self.queue.jobs[key]

    def report_jobs(self) -> list[QueuedJob]:
        """Jobs in the queue that will write the report."""
        jobs = {} if self.queue is None else self.queue.jobs
        return [
            jobs[key] for key in dict.fromkeys(b.report_job for b in self.batches) if key is not None and key in jobs
        ]

    @property
    def text(self) -> str:
        """How many jobs run, and how many wait for what; or why that is not known."""
        parts = queue_text(job for _, _, job in self.jobs())
        for job in self.report_jobs():
            parts.append(f"job {job.key} {'writes the report' if job.alive else 'will write the report'}")
        return self.problem or (f"Slurm: {', '.join(parts)}" if parts else "")


def look_at_queue(paths: SweepPaths) -> Look:
    """Ask Slurm, once, when there is an open batch; writes nothing."""
    batches, taken = list(read_batches(paths)), time.time()
    # Nobody may ever have submitted the scripts of a dry run, so that not knowing about them is no problem.
    sent = any(batch.job is not None or not batch.dry_run for batch in batches)
    if not batches:
        return Look((), None, taken)
    if not has_squeue():
        return Look(batches, None, taken, _problem("squeue is not installed here") if sent else "")
    if paths.plan.stat().st_uid != os.getuid():
        return Look(batches, None, taken, _problem("the sweep is another user's, whose jobs are not asked for"))
    queue = read_queue()
    if queue is None:
        return Look(batches, None, taken, _problem("the Slurm controller does not answer") if sent else "")
    return Look([numbered(batch, queue) for batch in batches], queue, taken)


def has_squeue() -> bool:
    """True when Slurm can be asked from here."""
    return shutil.which("squeue") is not None


def _problem(why: str) -> str:
    return f"{why}: states come from the cells' files alone, and jobs that wait are not seen"


@dataclass(frozen=True)
class Row:
    """A cell as it is now.

    Attributes
    ----------
    state : str
        As observed, or `submitted`: its job is in the queue and has not begun it.
    waits : bool
        Nothing is at it, and its job will be.
    """

    cell_id: str
    seen: Observed
    state: str
    job: str
    reason: str
    waits: bool = False

    @property
    def goes_on(self) -> bool:
        """True when it changes without anybody doing anything."""
        return self.seen.live or self.waits


@dataclass(frozen=True)
class Snapshot:
    """All cells of a sweep at one moment, in the order of `STATES`."""

    rows: Sequence[Row]
    look: Look

    @property
    def counts(self) -> dict[str, int]:
        """Cells by state, in the order of `STATES`; states without a cell are left out."""
        found = Counter(row.state for row in self.rows)
        return {state: found[state] for state in STATES if found[state]}

    @property
    def goes_on(self) -> bool:
        """True while something runs or waits, or may wait as far as is known."""
        if any(row.goes_on for row in self.rows):
            return True
        open_cells = {cell for batch in self.look.batches for job in batch.cells for cell in job}
        return bool(self.look.problem) and any(row.cell_id in open_cells and not row.seen.finished for row in self.rows)


def take_snapshot(sweep: Sweep, look: Look, cell_ids: Iterable[str] | None = None) -> Snapshot:
    """Read the directory of every cell, or of some."""
    places = {cell_id: (batch, job) for batch, index, job in look.jobs() for cell_id in batch.cells[index]}
    gone = _gone(look)
    rows = [_row(sweep.paths.cell(cell_id), look, places, gone) for cell_id in cell_ids or sweep.cells]
    order = {state: place for place, state in enumerate(STATES)}
    return Snapshot(sorted(rows, key=lambda row: (order.get(row.state, 0), not row.reason)), look)


def _gone(look: Look) -> dict[str, tuple[Batch, str]]:
    """Cell → the job of an open batch that it had and that has left the queue."""
    if look.queue is None:
        return {}
    return {
        cell_id: (batch, key)
        for batch in look.batches
        for key, index in batch.numbers().items()
        if key not in look.queue.jobs
        for cell_id in batch.cells[index]
    }


def _row(
    cell: CellPaths,
    look: Look,
    places: Mapping[str, tuple[Batch, QueuedJob]],
    gone: Mapping[str, tuple[Batch, str]],
) -> Row:
    cell_id = cell.root.name
    seen = _observe(cell, look)
    reason = " ".join(seen.reason.split())
    row = Row(cell_id, seen, seen.state, seen.job, reason)
    if cell_id in places and not seen.live:
        batch, job = places[cell_id]
        if seen.attempt <= batch.base.get(cell_id, 0):
            wanted = batch.fresh or not seen.finished
            why = "its job runs other cells first" if job.alive else job.waits_for
            return Row(cell_id, seen, "submitted", job.key, why, waits=True) if wanted else row
        if seen.state == "interrupted":
            why = f"{reason}; its job goes on" + ("" if job.alive else f" ({job.waits_for})")
            return Row(cell_id, seen, seen.state, job.key, why, waits=True)
    elif cell_id in gone and not seen.live and not seen.finished:
        batch, key = gone[cell_id]
        if seen.attempt <= batch.base.get(cell_id, 0):
            return Row(cell_id, seen, seen.state, key, f"job {key} left the queue before the cell began")
    return row


def _observe(cell: CellPaths, look: Look) -> Observed:
    seen = observe(cell, look.queue)
    if look.queue is None or seen.recorded or seen.state != "interrupted":
        return seen
    # A process that began after the queue was asked is unknown to it, not gone: its files decide.
    claim = latest(cell)
    young = claim is not None and claim.utc >= _utc(look.taken - YOUNG_S)
    return observe(cell) if young else seen


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def launchers(sweep: Sweep, rows: Iterable[Row]) -> set[str]:
    """Launchers of this machine whose cells run."""
    claims = [latest(sweep.paths.cell(row.cell_id)) for row in rows if row.seen.live]
    return {claim.launcher for claim in claims if claim is not None and launcher_runs(claim.launcher)}
