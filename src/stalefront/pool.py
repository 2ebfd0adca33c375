"""The local pool: one forked process a cell, from a parent that has everything imported.

A fresh process for every cell means that a hard death takes one cell with it and nothing leaks from cell to cell;
forking from a warm parent means that imports (seconds) are paid once, and that a cell costs about 0.2 s beside its own
work (measured).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import FrameType

from stalefront.claims import Jobs, latest, launcher_runs
from stalefront.compose import Planned
from stalefront.observe import Observed, observe
from stalefront.outcome import record_death
from stalefront.paths import CellPaths
from stalefront.slots import Slots
from stalefront.warm import warm_context
from stalefront.worker import TAKEN, Order, work

POLL_S = 0.25
# Between two looks at cells that other processes run.
LOOK_S = 1.0
# A launcher that lives gets this long to write down how its dead worker ended, before another one takes over.
LAST_WORD_S = 10.0


@dataclass
class Pace:
    """First and last learner step that were seen to be new, and when: start and warm-up lie before the first."""

    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None

    def note(self, step: int, now: float) -> None:
        """Note a look at the cell."""
        if step and (self.last is None or step != self.last[0]):
            self.first = self.first or (step, now)
            self.last = (step, now)

    @property
    def seconds_per_step(self) -> float | None:
        """None before two different steps were seen."""
        if self.first is None or self.last is None or self.last[0] <= self.first[0]:
            return None
        return (self.last[1] - self.first[1]) / (self.last[0] - self.first[0])


@dataclass
class Task:
    """One planned cell of this launch and what becomes of it.

    Attributes
    ----------
    seen : Observed
        What its directory said last.
    phase : str
        waiting (to be started here), here (its process is ours), elsewhere (another process is at it), or over.
    fresh : bool
        Start over instead of continuing from a checkpoint.
    base : int
        Attempts there were when this launch began; a later one by another launcher is not run again here.
    began, ended : float
        When its process was started here, when its end was noticed; 0 for not.
    pace : Pace
        How fast it moves.
    lost_since : float or None
        When its process, another launcher's, was first found to be gone without an outcome.
    """

    planned: Planned
    paths: CellPaths
    seen: Observed
    phase: str
    fresh: bool = False
    base: int = 0
    process: BaseProcess | None = None
    pid: int | None = None
    gpu: str | None = None
    began: float = 0.0
    ended: float = 0.0
    pace: Pace = field(default_factory=Pace)
    lost_since: float | None = None

    @property
    def attempt(self) -> int:
        """Number of the attempt that this launch makes."""
        return self.base + 1


def start_order(tasks: Sequence[Task]) -> list[Task]:
    """Order to start in: one cell of every warm-up first, then the longest first.

    Cells that share a supervised warm-up wait for the one that computes it. A cell's cost falls with the learner steps
    that a rollout batch serves.
    """

    def batches(task: Task) -> float:
        cell = task.planned.cell
        return cell.steps / cell.delay.steps_per_batch

    first: list[Task] = []
    rest: list[Task] = []
    met: set[tuple[int, str, str]] = set()
    for task in sorted(tasks, key=batches, reverse=True):
        cell = task.planned.cell
        key = (cell.seed, str(cell.model.as_dict()), str(cell.task.as_dict()))
        (rest if key in met or cell.model.warmup is None else first).append(task)
        met.add(key)
    return [*first, *rest]


class Pool:
    """Runs the tasks that wait, follows those that run elsewhere, and notices every end.

    Parameters
    ----------
    launcher
        Id of this launcher, for the claims.
    tell, say
        Called about four times a second; called with a sentence for the user.
    in_job : bool
        The pool has an allocation for itself: SIGUSR2 stops it too, a second signal means no more than the first, and
        a cell that another process has is left to it.
    jobs
        What is known about Slurm jobs.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        slots: Slots,
        launcher: str,
        *,
        tell: Callable[[], None],
        say: Callable[[str], None],
        in_job: bool = False,
        jobs: Jobs | None = None,
    ) -> None:
        self.tasks, self.slots, self.launcher, self.tell, self.say = tasks, slots, launcher, tell, say
        self.in_job, self.jobs = in_job, jobs
        self.stopped_by: int | None = None
        self.killed = False
        self._looked = 0.0
        self._passed_on = 0
        self._context: ForkServerContext | None = None

    def run(self) -> None:
        """Return when nothing is left to do; SIGINT, SIGTERM and SIGHUP make that soon, a second one at once."""
        waiting = start_order([task for task in self.tasks if task.phase == "waiting"])
        with self._signals():
            try:
                while self._busy(waiting):
                    while waiting and self.stopped_by is None and self.slots.fits(waiting[0].planned.cell):
                        self._start(waiting.pop(0))
                    ended = self._wait()
                    self._pass_on_stop()
                    self._reap(ended)
                    waiting += self._look_around()
                    self.tell()
            finally:
                self._signal_all(signal.SIGTERM)

    def _busy(self, waiting: Sequence[Task]) -> bool:
        here = any(task.phase == "here" for task in self.tasks)
        elsewhere = any(task.phase == "elsewhere" for task in self.tasks)
        return here or (self.stopped_by is None and (bool(waiting) or elsewhere))

    def _start(self, task: Task) -> None:
        self._context = self._context or warm_context([task.planned.cell for task in self.tasks])
        cell = task.planned.cell
        task.gpu = self.slots.take(cell)
        order = Order(task.paths.root, task.attempt, task.fresh, self.launcher, cell.threads, task.gpu)
        task.process = self._context.Process(target=work, args=(order,), name=cell.cell_id)
        task.process.start()
        task.pid = task.process.pid
        task.phase, task.began = "here", time.monotonic()

    def _wait(self) -> list[Task]:
        """Tasks whose process has ended, after at most `POLL_S`."""
        here = [task for task in self.tasks if task.phase == "here"]
        # Where the parent of all cells is gone, nobody tells how they end; that they do is seen.
        ended = [task for task in here if task.process is None and not observe(task.paths, self.jobs).live]
        running = {task.process.sentinel: task for task in here if task.process}
        if not running:
            time.sleep(POLL_S)
        return ended + [running[sentinel] for sentinel in wait(list(running), POLL_S) if isinstance(sentinel, int)]

    def _reap(self, ended: Sequence[Task]) -> None:
        for task in ended:
            code = _exit_code(task)
            task.process, task.seen = None, observe(task.paths, self.jobs)
            ours = task.seen.attempt <= task.attempt and code != TAKEN
            if ours and task.seen.live:
                continue
            task.phase, task.ended = "over" if ours or self.in_job else "elsewhere", time.monotonic()
            self.slots.give_back(task.planned.cell, task.gpu)
            if ours and not (task.seen.recorded and task.seen.attempt == task.attempt):
                self._bury(task, code)

    def _bury(self, task: Task, code: int | None) -> None:
        """Write down how a process ended that could not do so itself."""
        if self.stopped_by is not None:
            state, reason = "interrupted", f"stopped with the sweep: {exit_text(code)}"
        else:
            state, reason = "failed", f"its process ended early: {exit_text(code)}"
        record_death(task.paths, task.attempt, state, reason)
        task.seen = observe(task.paths, self.jobs)

    def _look_around(self) -> list[Task]:
        """Refresh what is known; returns tasks of other processes that have become ours to run."""
        if time.monotonic() - self._looked < LOOK_S:
            return []
        self._looked = time.monotonic()
        for task in self.tasks:
            if task.phase == "here":
                task.seen = observe(task.paths, self.jobs)
                task.pace.note(task.seen.step, self._looked)
        return [task for task in self.tasks if task.phase == "elsewhere" and self._is_ours_now(task)]

    def _is_ours_now(self, task: Task) -> bool:
        task.seen = observe(task.paths, self.jobs)
        if task.seen.live:
            task.lost_since = None
            return False
        # Stopped with another launcher, it goes on here from its checkpoint; any other outcome is the last word.
        stopped_there = task.seen.recorded and task.seen.state == "interrupted"
        if task.seen.recorded and not stopped_there:
            task.phase, task.ended = "over", time.monotonic()
            return False
        if not stopped_there and self._may_be_told(task):
            return False
        task.phase, task.base, task.fresh, task.lost_since = "waiting", task.seen.attempt, False, None
        return True

    def _may_be_told(self, task: Task) -> bool:
        """True while the launcher of a process that is gone may still write down how it ended."""
        claim, now = latest(task.paths), time.monotonic()
        task.lost_since = task.lost_since or now
        return claim is not None and launcher_runs(claim.launcher) and now - task.lost_since < LAST_WORD_S

    @contextmanager
    def _signals(self) -> Iterator[None]:
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *([signal.SIGUSR2] if self.in_job else [])]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.killed = self.stopped_by is not None and not self.in_job
        self.stopped_by = self.stopped_by or number

    def _pass_on_stop(self) -> None:
        """Tell our processes, once, what a signal to this one means: end in order, or end now."""
        wanted = 0 if self.stopped_by is None else signal.SIGKILL if self.killed else signal.SIGTERM
        if wanted != self._passed_on and any(task.phase == "here" for task in self.tasks):
            self._signal_all(wanted)
            self._passed_on = wanted
            gentle = "stopping: running cells save a checkpoint after their learner step; once more to end them now"
            self.say(gentle if wanted == signal.SIGTERM else "ending running cells now")

    def _signal_all(self, number: int) -> None:
        for task in self.tasks:
            if task.phase == "here" and task.pid:
                with suppress(ProcessLookupError):
                    os.kill(task.pid, number)


def _exit_code(task: Task) -> int | None:
    """Exit code of a task's process, which has ended; None where nobody was told."""
    if task.process is None:
        return None
    task.process.join()
    code = task.process.exitcode
    task.process.close()
    return code


def exit_text(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "how is not known"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = ", which is also how the system ends a process when memory runs out" if name == "SIGKILL" else ""
    return f"signal {-code} ({name}){hint}"
