"""What runs inside a job: a pool over its cells, and the decision to be requeued.

Started by submitit from a pickle that holds names alone (`Pack`), or without any pickle by
`python -m stalefront.slurm.job DIR BATCH INDEX`, as the scripts of a dry run do.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stalefront.app import working_directory_importable
from stalefront.cell import Cell
from stalefront.claims import launcher_id, slurm_job
from stalefront.compose import Planned
from stalefront.files import read_json, write_json, write_text
from stalefront.observe import Observed, observe
from stalefront.paths import CellPaths, SweepPaths
from stalefront.pool import Pool, Task
from stalefront.slots import Slots
from stalefront.slurm.batches import Batch, folder, read_batch, write_batch
from stalefront.slurm.queue import Queue, job_state, read_queue, run

# Slurm checks limits once a minute and sends the warning up to that much early.
EARLY_S = 65
# After asking to be requeued a job waits this long for Slurm to end it.
REQUEUED_S = 120
MIB = 2**20


@dataclass(frozen=True)
class Pack:
    """Cells of one job, by name: what submitit pickles."""

    root: str
    batch: str
    index: int

    def __call__(self) -> None:
        """Run the job; a cell without a finished outcome makes it exit with 1, so that Slurm calls it FAILED."""
        code = run_job(Path(self.root), self.batch, self.index)
        if code:
            sys.exit(code)

    def checkpoint(self) -> object:
        """Start the same again: for a signal that comes before this job listens to signals itself."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    # The name in submitit's documentation; the release before looks for the other one.
    __submitit_checkpoint__ = checkpoint


class OwnJob:
    """What this job knows about jobs: its own earlier runs are over, and Slurm is asked once about others."""

    def __init__(self) -> None:
        self.job, self.restart = slurm_job()
        self._queue: Queue | None = None
        self._asked = False

    def runs(self, job: str, restart: int) -> bool | None:
        """See `stalefront.claims.Jobs`."""
        if job == self.job:
            return restart == self.restart
        if not self._asked:
            self._queue, self._asked = read_queue(), True
        return None if self._queue is None else self._queue.runs(job, restart)


def run_job(root: Path, batch_name: str, index: int) -> int:
    """Run the cells of job `index` of a batch that still want it; 0 when all have a finished outcome."""
    began = time.monotonic()
    paths, jobs = SweepPaths(root.absolute()), OwnJob()
    batch = note_job(paths, read_batch(folder(paths, batch_name)), jobs.job)
    tasks = [task for cell_id in batch.cells[index] for task in make_task(paths.cell(cell_id), batch, jobs)]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or "none"
    print(f"job {jobs.job or 'without Slurm'}, run {jobs.restart + 1}, {socket.gethostname()}, GPUs {devices}")
    print(f"{len(tasks)} of {len(batch.cells[index])} cells to run", flush=True)
    if tasks:
        slots = make_job_slots(batch, [task.planned.cell for task in tasks])
        log = JobLog(tasks)
        pool = Pool(tasks, slots, launcher_id(), tell=log, say=log.say, in_job=True, jobs=jobs)
        with working_directory_importable():
            pool.run()
        log()
        if pool.stopped_by is not None:
            return after_stop(paths, batch, index, tasks, time.monotonic() - began)
    return 0 if all(observe(paths.cell(cell_id), jobs).finished for cell_id in batch.cells[index]) else 1


def note_job(paths: SweepPaths, batch: Batch, job: str) -> Batch:
    """Write down the number of a job that no launcher submitted, so that its end can be asked for later."""
    if batch.job is not None or not job:
        return batch
    batch = batch.with_(job=job.partition("_")[0], dry_run=False)
    write_batch(paths, batch)
    return batch


def make_task(cell: CellPaths, batch: Batch, jobs: OwnJob) -> list[Task]:
    """The cell as a task of this job; empty when nothing is to be done or another process is at it."""
    config = read_json(cell.config)
    seen = observe(cell, jobs)
    if seen.live or not is_wanted(seen, batch.base.get(config["cell_id"], 0), fresh=batch.fresh):
        return []
    planned = Planned(Cell.from_config(config["cell"]), config["run"], tuple(config["overrides"]))
    fresh = batch.fresh and seen.attempt <= batch.base.get(config["cell_id"], 0)
    return [Task(planned, cell, seen, "waiting", fresh=fresh, base=seen.attempt)]


def is_wanted(seen: Observed, base: int, *, fresh: bool) -> bool:
    """True when a cell of a batch is to run: not yet tried by it, or stopped on the way.

    An attempt after `base` that failed is the batch's own: running it again in the same job would fail again.
    """
    if seen.attempt > base:
        return seen.state == "interrupted"
    return fresh or not seen.finished


def make_job_slots(batch: Batch, cells: Sequence[Cell]) -> Slots:
    """`width` cells side by side, spread over the GPUs of this job; fewer where a GPU's memory cannot hold them."""
    ranks = max(cell.model.ranks for cell in cells)
    devices = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    on_gpu = any(cell.device.startswith("cuda") for cell in cells) and bool(devices)
    if not on_gpu or int(os.environ.get("SLURM_JOB_NUM_NODES") or 1) > 1:
        # On several nodes every node's ranks find their devices themselves.
        return Slots(batch.width, by_threads=False, gpus=None)
    if ranks > 1:
        return Slots(len(devices), by_threads=False, gpus=devices)
    width = min(batch.width, fitting_width(cells) * len(devices))
    return Slots(width, by_threads=False, gpus=[devices[i % len(devices)] for i in range(width)])


def fitting_width(cells: Sequence[Cell]) -> int:
    """Cells that fit on one GPU of this node by their estimated memory; at least 1."""
    from stalefront.memory import cell_bytes

    done = run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"])
    sizes = [int(line) for line in done.stdout.split() if line.isdigit()] if done is not None else []
    needs = [memory.device_bytes for cell in cells if (memory := cell_bytes(cell)) is not None]
    if not sizes or not needs or max(needs) == 0:
        return len(cells)
    width = max(1, min(sizes) * MIB // max(needs))
    if width < len(cells):
        print(f"at most {width} cells side by side on a GPU of {min(sizes)} MiB: each needs about {max(needs)} B")
    return width


class JobLog:
    """Says in the job's log what begins and what ends."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self._said: dict[str, str] = {}

    def __call__(self) -> None:
        """Print what is new."""
        for task in self.tasks:
            cell_id, phase = task.planned.cell.cell_id, task.phase
            if phase in ("here", "over") and self._said.get(cell_id) != phase:
                self._said[cell_id] = phase
                what = "begins" if phase == "here" else f"ends: {task.seen.state} {task.seen.reason}"
                self.say(f"cell {cell_id}, attempt {task.attempt}, {what}".rstrip())

    def say(self, text: str) -> None:
        """Print a sentence with the time."""
        print(time.strftime("%H:%M:%S", time.gmtime()), text, flush=True)


def after_stop(paths: SweepPaths, batch: Batch, index: int, tasks: Sequence[Task], elapsed_s: float) -> int:
    """Ask to be requeued when nobody else decides: the job was signalled and is not being ended by Slurm."""
    job, _ = slurm_job()
    if all(task.seen.finished or task.seen.state == "failed" for task in tasks):
        return 0 if all(task.seen.finished for task in tasks) else 1
    state = job_state(job) if job else None
    if state != "RUNNING":
        # Requeued by the controller, which starts it again, or cancelled, which does not.
        print(f"stopped; Slurm says {state or 'nothing'} about this job", flush=True)
        return 1
    if elapsed_s >= 60 * int(batch.profile["time_min"]) - int(batch.profile["signal_delay_s"]) - EARLY_S:
        count = count_timeout(folder(paths, batch.name) / f"timeouts.{index}")
        if count > batch.timeouts:
            minutes, allowed = batch.profile["time_min"], batch.timeouts
            explain(tasks, f"its time limit of {minutes} min was reached {count} times (timeouts={allowed})")
            return 1
    done = run(["scontrol", "requeue", job])
    if done is None or done.returncode != 0:
        explain(tasks, f"stopped, and not requeued: {done.stderr.strip() if done else 'scontrol does not answer'}")
        return 1
    print("requeued", flush=True)
    # Exiting now could be taken for the end of the job before the controller has requeued it.
    time.sleep(REQUEUED_S)
    return 1


def count_timeout(path: Path) -> int:
    """Note one more end of the time limit; returns how many there were."""
    count = (int(path.read_text(encoding="ascii")) if path.exists() else 0) + 1
    write_text(path, f"{count}\n")
    return count


def explain(tasks: Sequence[Task], reason: str) -> None:
    """Write into the outcomes of stopped cells why nobody continues them; their processes have ended."""
    print(reason, flush=True)
    for task in tasks:
        outcome = read_json(task.paths.outcome)
        if outcome is not None and outcome["attempt"] == task.attempt and outcome["state"] == "interrupted":
            write_json(task.paths.outcome, {**outcome, "reason": reason})


def main(arguments: Sequence[str]) -> int:
    """`python -m stalefront.slurm.job DIR BATCH [INDEX]`."""
    root, batch = arguments[:2]
    return run_job(Path(root), batch, int(arguments[2]) if len(arguments) > 2 and arguments[2] else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.exit(main(sys.argv[1:]))
