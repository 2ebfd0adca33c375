"""What becomes of a sweep of three cells when one of them, or its launcher, comes to harm; part of `bench/slurm.py`."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_ways import Cluster, Launch, Way, cluster, until

from stalefront.files import read_json

LIMIT_S = 60
BEGIN_S = 120
NEVER = f"not within {LIMIT_S} s"
# Long enough to be struck in the middle, short enough that the others end within the limit.
CELLS = ("seed=0,1,2", "steps=200")
Strike = Callable[[Cluster, Launch, Path], None]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes
    ----------
    strike
        Does it to the launcher or to the victim's folder; None where the cell does it itself.
    again : bool
        The same command is given once more.
    after_end : bool
        The strike comes when the sweep has ended well.
    """

    strike: Strike | None
    again: bool = False
    after_end: bool = False


def _job(cell: Path) -> str:
    return str((read_json(cell / "status.json") or {}).get("job"))


def _kill_cell(_: Cluster, __: Launch, cell: Path) -> None:
    os.kill(int((read_json(cell / "status.json") or {})["pid"]), signal.SIGKILL)


FAULTS: Mapping[str, Fault] = {
    "exception in a cell": Fault(None),
    "SIGKILL of a cell (as when memory runs out)": Fault(_kill_cell),
    "scancel of a cell's job": Fault(lambda where, _, cell: void(where.command("scancel", _job(cell)))),
    "scontrol requeue of a cell's job": Fault(
        lambda where, _, cell: void(where.command("scontrol", "requeue", _job(cell)))
    ),
    "USR2 to a cell's job (preemption)": Fault(
        lambda where, _, cell: void(where.command("scancel", "--signal=USR2", _job(cell)))
    ),
    "Ctrl-C": Fault(lambda _, launch, __: launch.signal(signal.SIGINT)),
    "launcher killed, same command again": Fault(lambda _, launch, __: launch.end(), again=True),
    "same command again after success": Fault(lambda *_: None, again=True, after_end=True),
}
# Those whose outcome depends on whether sacct answers.
HARD = ("SIGKILL of a cell (as when memory runs out)", "scancel of a cell's job")


def void(_: object) -> None:
    """For strikes whose command prints something."""


def measure_faults(where: Cluster, ways: Sequence[Way], text: str = "") -> dict[str, Any]:
    """Faults whose name holds `text` for every way; those of `HARD` also on a cluster without accounts."""
    found: dict[str, Any] = {"limit_s": LIMIT_S, "cells": 3}
    for accounts in (True, False):
        with nullcontext(where) if accounts else cluster(accounts=False) as there:
            for name, fault in FAULTS.items():
                key = name if accounts else f"{name}, no sacct"
                if text in key and (accounts or name in HARD):
                    found[key] = {way.name: one_fault(there, way, fault) for way in ways}
                    print(key, json.dumps(found[key], indent=1), flush=True)
    return found


def one_fault(where: Cluster, way: Way, fault: Fault) -> dict[str, Any]:
    """Run a sweep, strike, and see what comes of it within the limit."""
    with tempfile.TemporaryDirectory(prefix="sb-") as parent:
        folder = Path(parent) / "sweep"
        arguments = CELLS if fault.strike else _failing_cells(Path(parent))
        launch = way.start(where, folder, *arguments)
        try:
            victim = _ready(way, launch, folder, fault)
            if victim is None:
                return {"error": "it did not come so far", "said": [line for _, line in launch.lines[-5:]]}
            before = {cell: way.starts(cell) for cell in way.found(folder)} if fault.after_end else {}
            struck = time.monotonic()
            if fault.strike:
                fault.strike(where, launch, victim)
            if fault.again:
                launch = way.start(where, folder, *arguments)
            return _outcome(where, way, launch, folder, victim, struck, before)
        finally:
            launch.end()
            where.clear()


def _failing_cells(parent: Path) -> list[str]:
    """Three cells, of which one has a reward function that raises."""
    rows = [json.dumps({"prompt": f"{n}>", "answer": str(n)}) for n in range(100, 140)]
    (parent / "rows.jsonl").write_text("\n".join(rows) + "\n")
    task = ["task=file", f"task.path={parent / 'rows.jsonl'}", "task.max_completion_length=6"]
    return [*task, "task.reward_function=exact,bad_reward:raises,first_line"]


def _is_victim(cell: Path) -> bool:
    planned = json.loads((cell / "config.json").read_text())["cell"]
    return planned["seed"] == 1 or "raises" in planned["task"].get("reward_function", "")


def _ready(way: Way, launch: Launch, folder: Path, fault: Fault) -> Path | None:
    """The victim's folder once the strike may come: the cell runs, the sweep has ended, or the cell has failed."""
    if fault.after_end:
        launch.wait(BEGIN_S)
        return next((cell for cell in way.found(folder) if _is_victim(cell) and way.completed(folder) == 3), None)

    def look() -> Path | None:
        cells = way.found(folder)
        victim = next((cell for cell in cells if _is_victim(cell)), None)
        if victim is None or fault.strike is None:
            failed = victim is not None and (read_json(victim / "outcome.json") or {}).get("state") == "failed"
            return victim if failed else None
        status = read_json(victim / "status.json") or {}
        return victim if len(cells) == 3 and status.get("state") == "running" and status["step"] >= 1 else None

    return until(look, BEGIN_S)


def _outcome(
    where: Cluster, way: Way, launch: Launch, folder: Path, victim: Path, struck: float, before: Mapping[Path, int]
) -> dict[str, Any]:
    """What is to be known a limit after the strike, or as soon as everything has ended."""
    code = launch.wait(struck + LIMIT_S - time.monotonic())
    ended = time.monotonic() - struck
    queued = where.waiting()
    until(lambda: not where.waiting(), struck + LIMIT_S - time.monotonic())
    word = launch.word(struck)
    outcome = read_json(victim / "outcome.json") or {}
    others = [cell for cell in way.found(folder) if cell != victim]
    completed = [(read_json(cell / "outcome.json") or {}).get("state") == "completed" for cell in others]
    job = where.job(_job(victim))
    return {
        "exit code": NEVER if code is None else code,
        "s to the launcher's end": None if code is None else round(ended, 1),
        "s to the first word": None if word is None else round(word[0], 1),
        "first word": None if word is None else word[1].replace(str(folder), "DIR")[:240],
        "jobs in the queue at the launcher's end": None if code is None else queued,
        "others completed": f"{sum(completed)} of {len(others)}",
        "cell": outcome.get("state", "no outcome"),
        "cell's reason": str(outcome.get("reason", ""))[:160],
        "cell went on from step": outcome.get("resumed_from_step"),
        "cell's job in Slurm": f"{job.get('JobState')} {job.get('ExitCode')}",
        "starts of the cell": way.starts(victim) - before.get(victim, 0),
        "starts of the others": sum(way.starts(cell) - before.get(cell, 0) for cell in others),
        "last words": [line.replace(str(folder), "DIR")[:200] for _, line in launch.lines[-4:]],
    }
