"""`stalefront cancel`: ends jobs and launchers of one sweep, and nothing else."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from stalefront.choice import OptionError
from stalefront.claims import Claim, is_running, latest, launcher_runs
from stalefront.commands.planned import Sweep
from stalefront.commands.snapshot import Look, Row, Snapshot, look_at_queue, take_snapshot
from stalefront.files import locked
from stalefront.slurm.batches import Batch
from stalefront.slurm.queue import read_queue, run
from stalefront.slurm.settle import settle

# Slurm kills what does not end by itself after KillWait, 30 s by default.
WAIT_S = 60.0
QUEUE_EVERY_S = 2.0
FILES_EVERY_S = 0.5
# Job numbers of one scancel.
CHUNK = 200
MAX_NAMED = 8


@dataclass
class Doomed:
    """What is to be ended.

    Attributes
    ----------
    jobs : dict
        Number of a job in the queue → cells of it that it would have run on.
    numbers : list
        What scancel is given: an array as a whole where none of it is to stay.
    processes : dict
        (pid, start) of processes of this machine → what each is.
    cells : list
        Cells that those processes run.
    elsewhere : dict
        Cell → host on which a process that cannot be signalled from here runs it.
    """

    jobs: dict[str, list[str]] = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)
    processes: dict[tuple[int, int | None], str] = field(default_factory=dict)
    cells: list[str] = field(default_factory=list)
    elsewhere: dict[str, str] = field(default_factory=dict)


def cancel(sweep: Sweep, cell_ids: Sequence[str], *, whole_job: bool) -> int:
    """End what runs or waits of the sweep, or of some cells; 1 when something of it is still there afterwards."""
    with _no_submission(sweep):
        look = look_at_queue(sweep.paths)
        if look.problem:
            way_out = "Try again, on a login node and as the user who submitted them."
            raise OptionError("Slurm's queue", look.problem.partition(":")[0], "known: jobs may be in it", way_out)
        snapshot = take_snapshot(sweep, look)
        doomed = find_jobs(sweep, snapshot, cell_ids, whole_job=whole_job)
        find_processes(sweep, snapshot, cell_ids, doomed)
        reports = [] if cell_ids else [job.key for job in look.report_jobs()]
        _scancel([*doomed.numbers, *reports])
    if not (doomed.jobs or doomed.processes or reports):
        _nothing(sweep, snapshot, cell_ids, doomed)
        return 1 if doomed.elsewhere else 0
    _say_jobs(doomed, reports)
    _terminate(doomed)
    return max(_await_jobs(sweep, doomed, reports), _await_cells(sweep, doomed), 1 if doomed.elsewhere else 0)


def _no_submission(sweep: Sweep) -> AbstractContextManager[None]:
    """A launcher that submits array after array is waited for: otherwise those to come would be missed."""
    return locked(sweep.paths.submit_lock) if sweep.paths.jobs.is_dir() else nullcontext()


def find_jobs(sweep: Sweep, snapshot: Snapshot, cell_ids: Sequence[str], *, whole_job: bool) -> Doomed:
    """Jobs in the queue that hold one of the cells, or all jobs; raises `OptionError` when others would be hit."""
    rows = {row.cell_id: row for row in snapshot.rows}
    doomed, beside = Doomed(), list[str]()
    kept: set[str] = set()
    batches: dict[str, tuple[Batch, list[str]]] = {}
    for batch, index, job in snapshot.look.jobs():
        open_cells = [cell_id for cell_id in batch.cells[index] if _wants(rows.get(cell_id), job.key)]
        if cell_ids and not set(cell_ids) & set(open_cells):
            kept.add(batch.name)
            continue
        doomed.jobs[job.key] = open_cells
        batches.setdefault(batch.name, (batch, []))[1].append(job.key)
        beside += [f"job {job.key} also holds {sweep.label(one)}" for one in open_cells if one not in cell_ids]
    if cell_ids and beside and not whole_job:
        named = "; ".join(beside[:MAX_NAMED]) + (
            f"; … and {len(beside) - MAX_NAMED} more" if beside[MAX_NAMED:] else ""
        )
        way_out = f"{named}. Add --whole-job to end those too."
        raise OptionError("CELL", " ".join(cell_ids), "cells whose jobs hold no other unfinished cell", way_out)
    for name, (batch, keys) in batches.items():
        # One request for an array is also right for a task of it that is being requeued at this moment.
        doomed.numbers += keys if name in kept else [str(batch.job)]
    return doomed


def _wants(row: Row | None, job: str) -> bool:
    """True when the job runs the cell or will."""
    return row is not None and row.goes_on and row.job == job


def find_processes(sweep: Sweep, snapshot: Snapshot, cell_ids: Sequence[str], doomed: Doomed) -> None:
    """Add launchers of this machine; of single cells, and where a launcher is gone, the cells' own processes."""
    numbers = {key for batch in snapshot.look.batches for key in batch.numbers()}
    for row in snapshot.rows:
        claim = latest(sweep.paths.cell(row.cell_id)) if row.seen.live else None
        if claim is None or (cell_ids and row.cell_id not in cell_ids) or claim.job in numbers:
            continue
        if not claim.is_here:
            doomed.elsewhere[row.cell_id] = claim.host or "an unknown host"
            continue
        doomed.cells.append(row.cell_id)
        process, what = _process(claim, alone=bool(cell_ids))
        doomed.processes[process] = what.format(row.cell_id)


def _process(claim: Claim, *, alone: bool) -> tuple[tuple[int, int | None], str]:
    if not alone and launcher_runs(claim.launcher):
        _, pid, start = claim.launcher.rsplit("/", 2)
        return (int(pid), int(start) if start.isdigit() else None), "the launcher"
    return (claim.pid, claim.start), "the process of cell {}"


def terminate(pid: int, start: int | None) -> bool:
    """SIGTERM to the process with this pid that began at `start`; False when it is gone.

    The handle is opened before the start is compared: it stays with that process when the pid is given to another.
    """
    if start is None:
        return False
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not is_running(pid, start):
            return False
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _terminate(doomed: Doomed) -> None:
    for (pid, start), what in doomed.processes.items():
        try:
            sent = terminate(pid, start)
        except PermissionError:
            print(f"error: {what} (pid {pid}) is another user's", file=sys.stderr)
            continue
        done = "is asked to stop, which saves a checkpoint after the learner step" if sent else "is gone"
        print(f"{what} (pid {pid}) {done}", flush=True)


def _scancel(numbers: Sequence[str]) -> None:
    for start in range(0, len(numbers), CHUNK):
        done = run(["scancel", *numbers[start : start + CHUNK]])
        # Jobs that have just ended are no error; what is still there afterwards is said then.
        said = "scancel is not installed or gets no answer" if done is None else done.stderr.strip()
        if said:
            print(f"scancel: {said}", file=sys.stderr)


def _nothing(sweep: Sweep, snapshot: Snapshot, cell_ids: Sequence[str], doomed: Doomed) -> None:
    for row in snapshot.rows:
        if row.cell_id in cell_ids and row.cell_id not in doomed.elsewhere:
            print(f"cell {row.cell_id} is {row.state}" + (f": {row.reason}" if row.reason else ""))
    for host, count in Counter(doomed.elsewhere.values()).items():
        print(f"{count} cells run on {host} without a job of this sweep: run stalefront cancel there", file=sys.stderr)
    if not doomed.elsewhere:
        print(f"nothing to cancel in {sweep.paths.root}")


def _say_jobs(doomed: Doomed, reports: Sequence[str]) -> None:
    keys = list(doomed.jobs)
    if keys:
        named = ", ".join(keys[:MAX_NAMED]) + (f", … and {len(keys) - MAX_NAMED} more" if keys[MAX_NAMED:] else "")
        print(f"cancelled {len(keys)} {'job' if len(keys) == 1 else 'jobs'}: {named}", flush=True)
    for key in reports:
        print(f"cancelled job {key}, which would have written the report", flush=True)
    if keys or reports:
        print(f"waiting until they have left the queue, at most {WAIT_S:.0f} s", flush=True)


def _await_jobs(sweep: Sweep, doomed: Doomed, reports: Sequence[str]) -> int:
    """Wait until the jobs have left the queue, then write down what that means for their cells."""
    if not doomed.jobs and not reports:
        return 0
    wanted = {*doomed.jobs, *reports}

    def still_there() -> int:
        queue = read_queue()
        return len(wanted if queue is None else wanted & queue.jobs.keys())

    left = _wait(still_there, QUEUE_EVERY_S)
    if left:
        where = sweep.paths.root
        print(
            f"{left} of them are still in the queue after {WAIT_S:.0f} s; stalefront report {where} writes down "
            "how their cells ended when they have left it",
            file=sys.stderr,
        )
        return 1
    if settle(sweep.paths) is None:
        print(f"the Slurm controller does not answer; run stalefront report {sweep.paths.root} later", file=sys.stderr)
        return 1
    _say_cells(sweep, [cell_id for cells in doomed.jobs.values() for cell_id in cells])
    return 0


def _await_cells(sweep: Sweep, doomed: Doomed) -> int:
    """Wait until the cells of signalled processes have ended."""
    if not doomed.cells:
        return 0
    nobody = Look((), None, time.time())

    def still_run() -> int:
        return sum(row.seen.live for row in take_snapshot(sweep, nobody, doomed.cells).rows)

    left = _wait(still_run, FILES_EVERY_S)
    _say_cells(sweep, doomed.cells)
    if left:
        print(f"they save a checkpoint when their learner step ends: stalefront status {sweep.paths.root}")
    return 1 if left else 0


def _wait(left: Callable[[], int], every_s: float) -> int:
    """How many are left: 0 as soon as none is, another number after `WAIT_S`."""
    began = time.monotonic()
    while (found := left()) and time.monotonic() - began < WAIT_S:
        time.sleep(every_s)
    return found


def _say_cells(sweep: Sweep, cell_ids: Iterable[str]) -> None:
    ids = list(cell_ids)
    if not ids:
        return
    found = take_snapshot(sweep, Look((), None, time.time()), ids)
    text = ", ".join(f"{count} {state}" for state, count in found.counts.items())
    again = (
        ""
        if all(row.seen.finished for row in found.rows)
        else f". To run them again: stalefront retry {sweep.paths.root}"
    )
    print(f"of their cells: {text}{again}")
