"""What the end of a job means for its cells, written down where their own processes could not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from stalefront.files import locked, read_json, write_json
from stalefront.observe import Observed, observe
from stalefront.outcome import record_death
from stalefront.paths import SweepPaths
from stalefront.slurm.batches import Batch, numbered, read_batches, write_batch
from stalefront.slurm.queue import Ended, Queue, ended, read_queue
from stalefront.worker import set_aside

# A job that has left the queue gets this long before its cells are spoken for: a network file system may show their
# last words late. (assumed; NFS looks again after at most a minute, and at once when a file is opened)
GRACE_S = 10.0


def needs_word(seen: Observed, base: int, job: str) -> bool:
    """True when the end of `job` has to be written down for a cell that it had, and that had `base` attempts before."""
    if seen.attempt <= base:
        return not seen.live and not seen.finished
    if seen.job != job:
        return False  # it has gone on elsewhere
    return not seen.recorded or (seen.state == "interrupted" and job_text(job) not in seen.reason)


def job_text(job: str) -> str:
    """How a reason names a job."""
    return f"Slurm job {job}"


def settle_job(paths: SweepPaths, batch: Batch, job: str, end: Ended, queue: Queue) -> None:
    """Give every cell of a job that has ended its last word, where it has none or says merely that it was stopped."""
    if not end.final:
        return
    for cell_id in batch.cells[batch.index(job)]:
        cell, base = paths.cell(cell_id), batch.base[cell_id]
        seen = observe(cell, queue)
        if not needs_word(seen, base, job):
            continue
        if seen.attempt <= base:
            set_aside(cell, base + 1, fresh=False)
            reason = f"{job_text(job)} ended before the cell began: {end.text}"
            record_death(cell, base + 1, "failed", reason, host=None, job=job)
        elif not seen.recorded:
            record_death(cell, seen.attempt, "failed", f"{job_text(job)}: {end.text}", host=seen.host, job=job)
        else:
            # A cell that was cancelled with its job saves a checkpoint on its way out; it is over all the same.
            outcome = read_json(cell.outcome)
            state = "failed" if end.state == "CANCELLED" else "interrupted"
            reason = "; ".join(part for part in (outcome["reason"], f"{job_text(job)}: {end.text}") if part)
            write_json(cell.outcome, {**outcome, "state": state, "reason": reason})


def locate(paths: SweepPaths, batch: Batch, queue: Queue) -> Batch:
    """The batch with its number, which is written down when it was not known."""
    found = numbered(batch, queue)
    if found != batch:
        write_batch(paths, found)
    return found


def settle(paths: SweepPaths, *, sleep: Callable[[float], None] = time.sleep) -> int | None:
    """Settle every job of this sweep that has left the queue; returns how many are still in it, None if unknown."""
    # Inside the lock: a launcher that submits meanwhile would have jobs that an earlier look does not show.
    with locked(paths.submit_lock):
        queue = read_queue()
        if queue is None:
            return None
        batches = [locate(paths, batch, queue) for batch in read_batches(paths)]
        if any(lost_jobs(paths, batch, queue) for batch in batches):
            sleep(GRACE_S)
            queue = read_queue() or queue
        return sum(settle_batch(paths, batch, queue) for batch in batches)


def settle_batch(paths: SweepPaths, batch: Batch, queue: Queue) -> int:
    """Settle the jobs of one batch that have left the queue, and close it with the last; returns those still in it."""
    ends = ended(lost_jobs(paths, batch, queue))
    for job, end in ends.items():
        settle_job(paths, batch, job, end, queue)
    left = sum(job in queue.jobs or (job in ends and not ends[job].final) for job in batch.numbers())
    if not left and not batch.dry_run:
        write_batch(paths, batch.with_(closed=True))
    return left


def lost_jobs(paths: SweepPaths, batch: Batch, queue: Queue) -> list[str]:
    """Jobs that are not in the queue though a cell of theirs has no last word."""

    def wants_word(job: str, cell_id: str) -> bool:
        return needs_word(observe(paths.cell(cell_id), queue), batch.base[cell_id], job)

    gone = {job: index for job, index in batch.numbers().items() if job not in queue.jobs}
    return [job for job, index in gone.items() if any(wants_word(job, cell_id) for cell_id in batch.cells[index])]


def is_lost(batch: Batch, job: str, seen: Mapping[str, Observed]) -> bool:
    """The same of one job, from what was just read about its cells."""
    return any(needs_word(seen[cell_id], batch.base[cell_id], job) for cell_id in batch.cells[batch.index(job)])
