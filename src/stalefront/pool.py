"""The local pool: one forked process a cell, from a parent that has everything imported.

A fresh process for every cell means that a hard death takes one cell with it and nothing leaks from cell to cell;
forking from a warm parent means that imports (seconds) are paid once, and that a cell costs about 0.2 s beside its own
work (measured).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from stalefront.choice import OptionError
from stalefront.claims import latest, launcher_runs
from stalefront.compose import Planned
from stalefront.observe import Observed, observe
from stalefront.paths import CellPaths
from stalefront.worker import TAKEN, THREAD_VARIABLES, Order, modules_to_preload, record_death, work

POLL_S = 0.25
# Between two looks at cells that other processes run.
LOOK_S = 1.0
# A launcher that lives gets this long to write down how its dead worker ended, before another one takes over.
LAST_WORD_S = 10.0


@dataclass
class Task:
    """One planned cell of this launch and what becomes of it.

    Attributes
    ----------
    seen : Observed
        What its directory said last.
    base : int
        Attempts there were when this launch began; a later one by another launcher is not run again here.
    phase : str
        waiting (to be started here), here (its process is ours), elsewhere (another process is at it), or over.
    fresh : bool
        Start over instead of continuing from a checkpoint.
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
    moved: float = 0.0
    ended: float = 0.0
    first_step: int = 0
    lost_since: float | None = None

    @property
    def attempt(self) -> int:
        """Number of the attempt that this launch makes."""
        return self.base + 1


@dataclass
class Slots:
    """How much may run at a time.

    Attributes
    ----------
    free : int
        Cores, or workers, that are not taken.
    by_threads : bool
        A cell takes as many as it has threads; otherwise it takes one.
    gpus : list or None
        CUDA devices that are not taken; None when cells are not bound to devices.
    """

    total: int
    by_threads: bool
    gpus: list[str] | None
    free: int = field(init=False)

    def __post_init__(self) -> None:
        self.free = self.total

    def cost(self, task: Task) -> int:
        """Slots that a cell takes."""
        return min(task.planned.cell.threads, self.total) if self.by_threads else 1

    def take(self, task: Task) -> bool:
        """Take what a cell needs; False when there is not enough."""
        if self.cost(task) > self.free:
            return False
        self.free -= self.cost(task)
        task.gpu = self.gpus.pop(0) if self.gpus is not None else None
        return True

    def give_back(self, task: Task) -> None:
        """Free what a cell had."""
        self.free += self.cost(task)
        if self.gpus is not None and task.gpu is not None:
            self.gpus.append(task.gpu)


def make_slots(workers: int | None, gpus: Sequence[int | str], planned: Sequence[Planned]) -> Slots:
    """Slots of a launch: `workers` of them, one a GPU (those listed, or all of them), or as many as the cores carry."""
    if workers is not None and workers < 1:
        raise OptionError("hydra.launcher.workers", workers, "a whole number of at least 1, or null")
    on_cuda = [p.cell.device for p in planned if p.cell.device.startswith("cuda")]
    if on_cuda and not gpus and workers is None:
        import torch

        gpus = range(torch.cuda.device_count()) if set(on_cuda) == {"cuda"} else ()
        workers = None if gpus else 1
    if not gpus:
        return Slots(workers or cores(), by_threads=workers is None, gpus=None)
    if workers is not None:
        raise OptionError("hydra.launcher.workers", workers, "null with hydra.launcher.gpus", "One cell a GPU runs.")
    bound = next((device for device in on_cuda if ":" in device), None)
    if bound is not None:
        legal = "cuda with hydra.launcher.gpus: every cell sees one device"
        raise OptionError("device", bound, legal, "Leave out the index.")
    devices = [_visible(gpu) for gpu in gpus]
    return Slots(len(devices), by_threads=False, gpus=devices)


def _visible(gpu: int | str) -> str:
    """CUDA name of the device with this index among those that this process may see."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None or not isinstance(gpu, int):
        return str(gpu)
    names = [name for name in allowed.split(",") if name]
    if not 0 <= gpu < len(names):
        raise OptionError("hydra.launcher.gpus", gpu, f"an index into CUDA_VISIBLE_DEVICES={allowed}")
    return names[gpu]


def cores() -> int:
    """Cores that this process may use: its affinity, bounded by the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, _, period = quota.read_text(encoding="ascii").partition(" ")
        if limit != "max":
            allowed = min(allowed, max(1, int(limit) // int(period)))
    return allowed


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
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        slots: Slots,
        launcher: str,
        *,
        tell: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.tasks, self.slots, self.launcher, self.tell, self.say = tasks, slots, launcher, tell, say
        self.stopped_by: int | None = None
        self.killed = False
        self._looked = 0.0
        self._passed_on = 0

    def run(self) -> None:
        """Return when nothing is left to do; SIGINT, SIGTERM and SIGHUP make that soon, a second one at once."""
        waiting = start_order([task for task in self.tasks if task.phase == "waiting"])
        context = _warm_context(waiting) if waiting else None
        with self._signals():
            try:
                while self._busy(waiting):
                    while context and waiting and self.stopped_by is None and self.slots.take(waiting[0]):
                        self._start(waiting.pop(0), context)
                    self._pass_on_stop()
                    self._reap(self._wait())
                    waiting += self._look_around()
                    self.tell()
            finally:
                self._signal_all(signal.SIGTERM)

    def _busy(self, waiting: Sequence[Task]) -> bool:
        here = any(task.phase == "here" for task in self.tasks)
        elsewhere = any(task.phase == "elsewhere" for task in self.tasks)
        return here or (self.stopped_by is None and (bool(waiting) or elsewhere))

    def _start(self, task: Task, context: ForkServerContext) -> None:
        cell = task.planned.cell
        order = Order(task.paths.root, task.attempt, task.fresh, self.launcher, cell.threads, task.gpu)
        task.process = context.Process(target=work, args=(order,), name=cell.cell_id)
        task.process.start()
        task.pid = task.process.pid
        task.phase, task.began, task.first_step = "here", time.monotonic(), task.seen.step

    def _wait(self) -> list[Task]:
        """Tasks whose process has ended, after at most `POLL_S`."""
        here = [task for task in self.tasks if task.phase == "here"]
        # Where the parent of all cells is gone, nobody tells how they end; that they do is seen.
        ended = [task for task in here if task.process is None and not observe(task.paths).live]
        running = {task.process.sentinel: task for task in here if task.process}
        if not running:
            time.sleep(POLL_S)
        return ended + [running[sentinel] for sentinel in wait(list(running), POLL_S) if isinstance(sentinel, int)]

    def _reap(self, ended: Sequence[Task]) -> None:
        for task in ended:
            code = _exit_code(task)
            task.process, task.seen = None, observe(task.paths)
            ours = task.seen.attempt <= task.attempt and code != TAKEN
            if ours and task.seen.live:
                continue
            task.phase, task.ended = "over" if ours else "elsewhere", time.monotonic()
            self.slots.give_back(task)
            if ours and not (task.seen.recorded and task.seen.attempt == task.attempt):
                self._bury(task, code)

    def _bury(self, task: Task, code: int | None) -> None:
        """Write down how a process ended that could not do so itself."""
        if self.stopped_by is not None:
            state, reason = "interrupted", f"stopped with the sweep: {exit_text(code)}"
        else:
            state, reason = "failed", f"its process ended early: {exit_text(code)}"
        record_death(task.paths, task.attempt, state, reason)
        task.seen = observe(task.paths)

    def _look_around(self) -> list[Task]:
        """Refresh what is known; returns tasks of other processes that have become ours to run."""
        if time.monotonic() - self._looked < LOOK_S:
            return []
        self._looked = time.monotonic()
        for task in self.tasks:
            if task.phase == "here":
                step = task.seen.step
                task.seen = observe(task.paths)
                task.moved = self._looked if task.seen.step != step else task.moved
        return [task for task in self.tasks if task.phase == "elsewhere" and self._is_ours_now(task)]

    def _is_ours_now(self, task: Task) -> bool:
        task.seen = observe(task.paths)
        if task.seen.live:
            task.lost_since = None
            return False
        if task.seen.recorded:
            task.phase, task.ended = "over", time.monotonic()
            return False
        claim, now = latest(task.paths), time.monotonic()
        task.lost_since = task.lost_since or now
        if claim and launcher_runs(claim.launcher) and now - task.lost_since < LAST_WORD_S:
            return False
        task.phase, task.base, task.fresh = "waiting", task.seen.attempt, False
        return True

    @contextmanager
    def _signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.killed = self.stopped_by is not None
        self.stopped_by = self.stopped_by or number

    def _pass_on_stop(self) -> None:
        """Tell our processes, once, what a signal to this one means: end in order, or end now."""
        wanted = 0 if self.stopped_by is None else signal.SIGKILL if self.killed else signal.SIGTERM
        if wanted != self._passed_on:
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


def _warm_context(tasks: Sequence[Task]) -> ForkServerContext:
    """Start the parent that cells are forked from; it imports what they need while the launcher goes on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules_to_preload(task.planned.cell for task in tasks))
    threads = str(max(task.planned.cell.threads for task in tasks))
    # Signals for the whole group must not take this parent away: then nobody would hear how its children end.
    deaf = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    # Starting the tracker unblocks signals, so it has to run before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deaf)
    try:
        # Read at import. Progress bars would fill the cells' logs.
        with environment({**dict.fromkeys(THREAD_VARIABLES, threads), "TQDM_DISABLE": "1"}):
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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
