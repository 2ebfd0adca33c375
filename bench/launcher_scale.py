"""Seconds and memory of the Slurm launcher's own process for grids of 100, 1,000 and 10,000 cells without any work.

Every number comes from a process of its own, and its memory is what that process had at most (VmHWM). Slurm is
replaced by texts that `squeue` would print, so that no cluster is needed and none is measured.

`plan`     cells composed, checked and written down, nothing more
`dry run`  the same with the scripts, ten cells a job
`queued`   the same command again, one job a cell, all of them waiting: adopting, and one look at the queue
`running`  the same with all jobs running
`half`     one look after half of the jobs have left the queue, and one more
`finished` the same command again with every cell completed
`status`   the table of `stalefront status`, all jobs waiting

Usage: python bench/launcher_scale.py [CELLS ...]
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stalefront import app, launch
from stalefront.files import read_json, write_json
from stalefront.paths import SweepPaths

SIZES = (100, 1000, 10_000)
PHASES = ("plan", "dry run", "queued", "running", "half", "finished", "status")
CELLS_PER_JOB = 10
Seconds = dict[str, float]


@contextlib.contextmanager
def timed(seconds: Seconds, owner: Any, name: str, label: str) -> Iterator[None]:
    """Add up the seconds that calls of `owner.name` take."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds[label] = seconds.get(label, 0.0) + time.perf_counter() - began

    with replaced(owner, name, call):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put `value` in the place of `owner.name`."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def peak_mb() -> float:
    """Most memory this process had; `ru_maxrss` would count what the process had that started it."""
    text = Path("/proc/self/status").read_text()
    return round(int(text.partition("VmHWM:")[2].split()[0]) / 1024, 1)


def command(root: Path, cells: int, *options: str) -> int:
    """The launcher in this process, what it prints thrown away."""
    words = ["-m", "sweep=null", f"seed=range(0,{cells})", f"hydra.sweep.dir={root}", "hydra/launcher=slurm"]
    with contextlib.redirect_stdout(io.StringIO()):
        return app.run([*words, "slurm=cpu", "hydra.launcher.report=false", *options])


def launched(root: Path, cells: int, *options: str) -> Seconds:
    """Seconds of one launch by its parts."""
    from stalefront import grid
    from stalefront.compose import Composer
    from stalefront.slurm.backend import SlurmBackend

    seconds: Seconds = {}
    with contextlib.ExitStack() as stack:
        for owner, name, label in (
            (grid, "expand", "expand axes"),
            (Composer, "cells", "compose"),
            (launch, "record_plan", "write plan and cells"),
            (launch, "_task", "look at cells"),
            (SlurmBackend, "run", "back end"),
        ):
            stack.enter_context(timed(seconds, owner, name, label))
        began = time.perf_counter()
        code = command(root, cells, *options)
        seconds["total"] = time.perf_counter() - began
    # 1: not all cells have finished, as is so when following them ends after a look or two.
    if code not in (0, 1):
        raise RuntimeError(f"exit code {code}")
    return seconds


def plan(root: Path, cells: int) -> Seconds:
    from stalefront.slurm.backend import SlurmBackend

    with replaced(SlurmBackend, "run", lambda *_: launch.Ending(None, left=True)):
        return launched(root, cells, "hydra.launcher.dry_run=true")


def dry_run(root: Path, cells: int) -> Seconds:
    return launched(root, cells, "hydra.launcher.dry_run=true", f"hydra.launcher.cells_per_job={CELLS_PER_JOB}")


def queue_text(root: Path, state: str, skip: int = 0) -> str:
    """What squeue would print about every batch; the first `skip` jobs have left the queue."""
    from stalefront.slurm.batches import read_batches

    lines = []
    for number, batch in enumerate(read_batches(SweepPaths(root)), start=1000):
        for index in range(len(batch.cells)):
            lines.append(f"{number}|{index}|{number + index}|{state}|n1|{batch.job_name}|Priority")
    return "\n".join(lines[skip:]) + "\n"


@contextlib.contextmanager
def fake_slurm(text: Callable[[], str]) -> Iterator[None]:
    """Slurm's commands are there, and squeue prints `text()`."""
    from stalefront.slurm import queue

    def run(words: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 0, text() if words[0] == "squeue" else "", "")

    with replaced(queue, "run", run), replaced(shutil, "which", lambda name: name):
        yield


@contextlib.contextmanager
def looks(seconds: Seconds, *between: Callable[[], None]) -> Iterator[None]:
    """Following jobs is one look, and one more after each of `between`, with what is printed after each."""
    from stalefront.slurm.wait import Watch

    def run(watch: Watch) -> None:
        for number, change in enumerate([lambda: None, *between]):
            change()
            began = time.perf_counter()
            watch.look()
            watch.tell()
            seconds[f"look {number + 1}"] = time.perf_counter() - began

    with replaced(Watch, "run", run):
        yield


def attached(root: Path, cells: int, state: str, *, leaving: int = 0) -> Seconds:
    """The command again while jobs of it are in the queue; `leaving` of them complete between two looks."""
    now = [queue_text(root, state)]
    seconds: Seconds = {}

    def leave() -> None:
        complete(root, leaving)
        now[0] = queue_text(root, state, skip=leaving)

    changes = (leave, lambda: None) if leaving else ()
    with fake_slurm(lambda: now[0]), looks(seconds, *changes):
        return launched(root, cells) | seconds


def complete(root: Path, count: int) -> None:
    """Give the cells of the first `count` jobs the outcome of a completed attempt."""
    from stalefront.slurm.batches import read_batches

    paths = SweepPaths(root)
    cell_ids = [cell for batch in read_batches(paths) for job in batch.cells for cell in job]
    for cell_id in cell_ids[:count]:
        write_json(paths.cell(cell_id).outcome, {"state": "completed", "attempt": 1, "last_step": 256, "reason": ""})


def finished(root: Path, cells: int) -> Seconds:
    complete(root, cells)
    with fake_slurm(str):
        return launched(root, cells)


def status(root: Path, _: int) -> Seconds:
    from rich.console import Console

    from stalefront.commands.planned import Sweep
    from stalefront.commands.snapshot import STATES, look_at_queue, take_snapshot
    from stalefront.commands.status import table

    text, seconds = queue_text(root, "PENDING"), {}
    with fake_slurm(lambda: text):
        marks = [time.perf_counter()]
        sweep = Sweep.read(root)
        marks.append(time.perf_counter())
        snapshot = take_snapshot(sweep, look_at_queue(sweep.paths))
        marks.append(time.perf_counter())
        Console(file=io.StringIO(), soft_wrap=True).print(table(sweep, snapshot, STATES))
        marks.append(time.perf_counter())
    for label, start, end in zip(("read plan", "look at cells", "table"), marks, marks[1:], strict=False):
        seconds[label] = end - start
    return seconds | {"total": marks[-1] - marks[0]}


def measure(phase: str, root: Path, cells: int) -> dict[str, Any]:
    """Run one phase in this process."""
    ways: dict[str, Callable[[Path, int], Seconds]] = {
        "plan": plan,
        "dry run": dry_run,
        # Not measured: what the phases after it start from.
        "prepare": lambda root, cells: launched(root, cells, "hydra.launcher.dry_run=true"),
        "queued": lambda root, cells: attached(root, cells, "PENDING"),
        "running": lambda root, cells: attached(root, cells, "RUNNING"),
        "half": lambda root, cells: attached(root, cells, "RUNNING", leaving=cells // 2),
        "finished": finished,
        "status": status,
    }
    seconds = ways[phase](root, cells)
    return {"s": {label: round(value, 3) for label, value in seconds.items()}, "peak MB": peak_mb()}


def in_child(phase: str, root: Path, cells: int) -> dict[str, Any]:
    """Run one phase in a process of its own."""
    words = [sys.executable, __file__, "--child", phase, str(root), str(cells)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{phase}, {cells} cells:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def sized(cells: int) -> dict[str, Any]:
    """Every phase for one size, in fresh directories where it begins from nothing."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="sb-") as folder:
        prepared = Path(folder) / "prepared"
        in_child("prepare", prepared, cells)
        for phase in PHASES:
            root = Path(folder) / phase.replace(" ", "-")
            if phase not in ("plan", "dry run"):
                shutil.copytree(prepared, root)
                _move_in(root)
            found[phase] = in_child(phase, root, cells)
            shutil.rmtree(root)
            print(cells, phase, found[phase], flush=True)
    return found


def _move_in(root: Path) -> None:
    """A copied sweep is about its own directory, or its cells would be written anew: where they keep their cache."""
    paths = SweepPaths(root)
    for cell_id in (read_json(paths.plan) or {})["cells"]:
        config = read_json(paths.cell(cell_id).config) or {}
        config["run"]["cache_dir"] = str(paths.cache)
        write_json(paths.cell(cell_id).config, config)


def main(sizes: list[int]) -> None:
    """Measure and write the result."""
    from harness import write_result

    found = {str(cells): sized(cells) for cells in sizes}
    write_result("launcher_scale", {"cells a job of the dry run": CELLS_PER_JOB, "cells": found})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))
    else:
        main([int(word) for word in sys.argv[1:]] or list(SIZES))
