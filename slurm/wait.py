"""Following jobs: one look at the queue an interval, and the cells' own files for the rest."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from stalefront.files import locked
from stalefront.observe import Observed, observe
from stalefront.paths import SweepPaths
from stalefront.pool import Task
from stalefront.slurm.batches import Batch, folder, read_batch, write_batch
from stalefront.slurm.queue import Queue, ended, queue_text, read_queue
from stalefront.slurm.settle import GRACE_S, is_lost, settle_job

# Between two calls of `tell` and two looks for a signal.
TICK_S = 0.25


class Stop:
    """Notes the first signal that asks this process to end; jobs are not told."""

    def __init__(self) -> None:
        self.by: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, SIGINT, SIGTERM and SIGHUP are noted instead of ending the process; a second one ends it."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.by is not None:
            raise KeyboardInterrupt
        self.by = number


class Watch:
    """Follows the cells of some batches until none of their jobs is in the queue.

    Parameters
    ----------
    poll_s : float
        Between two looks at the queue and at the cells of running jobs.
    note
        Told, at each look, what the queue is like.
    """

    def __init__(
        self,
        paths: SweepPaths,
        batches: Sequence[Batch],
        tasks: Sequence[Task],
        *,
        poll_s: float,
        stop: Stop,
        tell: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        self.paths, self.poll_s, self.stop, self.tell, self.note = paths, poll_s, stop, tell, note
        self.batches = {batch.name: batch for batch in batches}
        self.open = {job: batch.name for batch in batches for job in batch.numbers()}
        self._left = Counter(self.open.values())
        self.tasks = {task.planned.cell.cell_id: task for task in tasks}
        self._gone: dict[str, float] = {}

    def run(self) -> None:
        """Return when every job has left the queue and every cell has its last word, or on a signal."""
        while self.open and self.stop.by is None:
            began = time.monotonic()
            self.look()
            while self.open and self.stop.by is None and time.monotonic() - began < self.poll_s:
                self.tell()
                time.sleep(TICK_S)
        self.tell()

    def look(self) -> None:
        """One look at the queue, at the cells that run, and at those whose jobs are gone."""
        queue = read_queue()
        if queue is None:
            self.note("the Slurm controller does not answer; jobs are not affected by that")
            return
        self.note(", ".join(queue_text(queue.jobs[job] for job in self.open if job in queue.jobs)))
        now = time.monotonic()
        lost: dict[str, bool] = {}
        for job, name in list(self.open.items()):
            batch, found = self.batches[name], queue.jobs.get(job)
            if found is None:
                self._gone.setdefault(job, now)
                lost[job] = is_lost(batch, job, self._observe(batch, job, queue))
            else:
                self._gone.pop(job, None)
                if found.alive:
                    self._observe(batch, job, queue)
        self._settle(queue, now, lost)

    def _observe(self, batch: Batch, job: str, queue: Queue) -> dict[str, Observed]:
        """What the directories of a job's cells say now."""
        found = {}
        for cell_id in batch.cells[batch.index(job)]:
            task = self.tasks.get(cell_id)
            found[cell_id] = seen = observe(self.paths.cell(cell_id), queue)
            if task is not None:
                task.seen = seen
                task.pace.note(seen.step, time.monotonic())
        return found

    def _settle(self, queue: Queue, now: float, lost: Mapping[str, bool]) -> None:
        """Close the jobs that are gone: at once when all their cells have spoken, else after a while."""
        late = [job for job, is_so in lost.items() if is_so and now - self._gone[job] >= GRACE_S]
        told: set[str] = set()
        if late:
            with locked(self.paths.submit_lock):
                for job, end in ended(late).items():
                    if not end.final:
                        continue  # requeued this very moment
                    told.add(job)
                    batch = self.batches[self.open[job]]
                    settle_job(self.paths, batch, job, end, queue)
                    self._observe(batch, job, queue)
        for job, is_so in lost.items():
            if not is_so or job in told:
                self._close(self.batches[self.open[job]], job)

    def _close(self, batch: Batch, job: str) -> None:
        for cell_id in batch.cells[batch.index(job)]:
            task = self.tasks.get(cell_id)
            if task is not None:
                task.phase, task.ended = "over", time.monotonic()
        del self.open[job], self._gone[job]
        self._left[batch.name] -= 1
        if not self._left[batch.name]:
            with locked(self.paths.submit_lock):
                # Another process may have added the number of the report's job.
                stored = read_batch(folder(self.paths, batch.name))
                write_batch(self.paths, stored.with_(closed=True))
