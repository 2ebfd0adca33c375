"""One launch of planned cells: plan, choose, run, report, and a summary with an exit code."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stalefront.choice import OptionError
from stalefront.claims import Jobs, launcher_id
from stalefront.compose import Planned
from stalefront.labels import duration
from stalefront.observe import Observed, observe
from stalefront.paths import SweepPaths
from stalefront.plan import Difference, Header, differences, record_plan
from stalefront.pool import Pool, Task
from stalefront.progress import Progress, labels
from stalefront.slots import make_slots

RERUN = ("missing", "failed", "all")
NOT_FINISHED, STOPPED = 1, 128
# Settings that the warning about a shared directory names; the others are counted.
MAX_NAMED = 6


@dataclass(frozen=True)
class Options:
    """Options that every launcher has.

    Attributes
    ----------
    rerun : str
        `missing`: every cell without a completed or non-finite outcome; failed and interrupted ones go on from their
        checkpoint. `failed`: those two alone. `all`: every cell from scratch, earlier records kept in `attempts/`.
    report : bool
        Build the report at the end.
    """

    rerun: str
    report: bool

    def __post_init__(self) -> None:
        if self.rerun not in RERUN:
            raise OptionError("hydra.launcher.rerun", self.rerun, f"one of {', '.join(RERUN)}")


@dataclass(frozen=True)
class Ending:
    """How a back end came to its end.

    Attributes
    ----------
    stopped_by : int or None
        Signal that ended the launch.
    left : bool
        Cells were left to run without this launch, or were never meant to be run by it: no report is due.
    failed : bool
        Something beside cells went wrong, and was said.
    """

    stopped_by: int | None
    left: bool = False
    failed: bool = False


class Backend(Protocol):
    """Where cells run."""

    def prepare(self, planned: Sequence[Planned]) -> None:
        """Raise `OptionError` about what cannot work there, before anything is written."""

    def jobs(self) -> Jobs | None:
        """What is known about Slurm jobs."""

    def slots(self, tasks: Sequence[Task]) -> int:
        """Cells that run at a time."""

    def run(self, paths: SweepPaths, name: str, tasks: Sequence[Task], progress: Progress) -> Ending:
        """Run the tasks that wait and follow those that others run; every task's `seen` and `phase` end up true."""


@dataclass
class LocalBackend:
    """Processes of this machine.

    Attributes
    ----------
    workers : int or None
        Cells at a time; None for as many as the cores carry.
    gpus : sequence of int
        One cell at a time on each.
    """

    workers: int | None
    gpus: Sequence[int | str]

    def prepare(self, planned: Sequence[Planned]) -> None:
        """See `Backend`."""
        self._slots = make_slots(self.workers, self.gpus, [p.cell for p in planned])

    def jobs(self) -> Jobs | None:
        """See `Backend`: nothing is asked."""
        return None

    def slots(self, tasks: Sequence[Task]) -> int:
        """See `Backend`."""
        return self._slots.total

    def run(self, paths: SweepPaths, name: str, tasks: Sequence[Task], progress: Progress) -> Ending:
        """See `Backend`."""
        pool = Pool(tasks, self._slots, launcher_id(), tell=progress, say=progress.say)
        pool.run()
        return Ending(pool.stopped_by, left=pool.killed)


@dataclass(frozen=True)
class Summary:
    """How a launch ended: the exit code and every cell of it; `left` when cells go on without it."""

    code: int
    cells: dict[str, Observed]
    left: bool = False


class CellError(RuntimeError):
    """A cell of the launch has no finished outcome."""


# Hydra drops what a sweeper returns, so the exit code of the command is taken from here.
LAUNCHED: list[Summary] = []


def exit_code() -> int:
    """Exit code of this process: the worst of its launches."""
    return max((summary.code for summary in LAUNCHED), default=0)


def launch(sweep_dir: Path, header: Header, planned: Sequence[Planned], options: Options, backend: Backend) -> Summary:
    """Run what is to be run of `planned` in `sweep_dir`, whatever happens to single cells."""
    began = time.monotonic()
    paths = SweepPaths(sweep_dir.absolute())
    backend.prepare(planned)
    _warn(paths, differences(paths, header, planned))
    record_plan(paths, header, planned)
    tasks = [_task(paths, p, options.rerun, backend.jobs()) for p in planned]
    _introduce(header)
    _announce(paths, tasks)
    with Progress(header.name, tasks, backend.slots(tasks)) as progress:
        ending = backend.run(paths, header.name, tasks, progress)
    wanted = options.report and not ending.left
    built = wanted and _report(paths)
    code = _code(tasks, ending, report_missing=wanted and not built)
    summary = Summary(code, {task.planned.cell.cell_id: task.seen for task in tasks}, left=ending.left)
    _conclude(paths, tasks, time.monotonic() - began, report_built=built, left=ending.left)
    LAUNCHED.append(summary)
    return summary


def _code(tasks: Sequence[Task], ending: Ending, *, report_missing: bool) -> int:
    """Exit code: cells left to run on purpose are no failure."""
    if ending.stopped_by is not None:
        return STOPPED + ending.stopped_by
    unfinished = not ending.left and not all(task.seen.finished for task in tasks)
    return NOT_FINISHED if unfinished or ending.failed or report_missing else 0


def _task(paths: SweepPaths, planned: Planned, rerun: str, jobs: Jobs | None) -> Task:
    cell = paths.cell(planned.cell.cell_id)
    seen = observe(cell, jobs)
    fresh = rerun == "all"
    wanted = {"missing": not seen.finished, "failed": seen.state in ("failed", "interrupted"), "all": True}[rerun]
    phase = "over" if not wanted and not (seen.live and not seen.finished) else "elsewhere" if seen.live else "waiting"
    return Task(planned, cell, seen, phase, fresh=fresh, base=seen.attempt)


def _announce(paths: SweepPaths, tasks: Sequence[Task]) -> None:
    phases = Counter(task.phase for task in tasks)
    finished = sum(task.seen.finished for task in tasks if task.phase == "over")
    text = f"{len(tasks)} {_cells(len(tasks))} in {_shown(paths.root)}: {finished} finished before, "
    text += f"{phases['waiting']} to run"
    text += f", {phases['elsewhere']} running in other processes" if phases["elsewhere"] else ""
    left_out = phases["over"] - finished
    text += f", {left_out} not asked for" if left_out else ""
    print(f"{text}.", flush=True)


def _introduce(header: Header) -> None:
    if header.question:
        print(f"{header.name}: {header.question}")


def _warn(paths: SweepPaths, found: Sequence[Difference]) -> None:
    """One line about settings that the cells of this launch and those planned here before do not share."""
    if not found:
        return
    named = [f"{one.key} ({one.there} there, {one.here} here)" for one in found[:MAX_NAMED]]
    named += [f"{len(found) - MAX_NAMED} more"] if len(found) > MAX_NAMED else []
    text = f"warning: {_shown(paths.root)} already holds cells with other settings: {', '.join(named)}."
    print(f"{text} To keep these cells apart, stop and give hydra.sweep.dir=DIR.", flush=True)


def _report(paths: SweepPaths) -> bool:
    """Build the report; a report that cannot be built costs nothing but itself. True when it was built."""
    try:
        from stalefront.analysis.report import build_report

        build_report(paths.root)
    except Exception:  # noqa: BLE001  # the cells are safe on disk, and the command has to end in order
        traceback.print_exc()
        print(f"error: the report could not be built; the cells are safe. Try: stalefront report {_shown(paths.root)}")
        return False
    return True


def _conclude(paths: SweepPaths, tasks: Sequence[Task], wall_s: float, *, report_built: bool, left: bool) -> None:
    states = Counter("submitted" if _is_queued(task) else task.seen.state for task in tasks)
    after = "." if left else f" in {duration(wall_s)}."
    print(f"{', '.join(f'{n} {state}' for state, n in states.most_common())}{after}")
    names = labels(tasks)
    for task in tasks:
        if task.seen.state == "failed" and not _is_queued(task):
            reason = f"{names[task.planned.cell.cell_id]} failed: {task.seen.reason} (log: {_shown(task.paths.log)})"
            print(reason, file=sys.stderr)
    if len(tasks) == 1:
        print(f"Records: {_shown(tasks[0].paths.root)}")
    if report_built:
        print(f"Report: {_shown(paths.root / 'report.html')}")
    sys.stdout.flush()


def _is_queued(task: Task) -> bool:
    """True for a cell that was left in the queue."""
    return task.phase == "elsewhere" and not task.seen.live and not task.seen.finished


def _cells(count: int) -> str:
    return "cell" if count == 1 else "cells"


def _shown(path: Path) -> str:
    """`path` as short as it can be said."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
