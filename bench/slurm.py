"""Our Slurm launcher against hydra-submitit-launcher: the same cells, the same throw-away cluster, as root.

`grid`    wall seconds of a 2 × 3 grid of cells of a second, interpreters and imports included
`submit`  seconds until 1,000 jobs are in the queue
`rpcs`    requests a minute at the controller and the accounting daemon while 20 jobs run
`faults`  what becomes of a sweep when something goes wrong

A round runs every way, in an order that alternates; ratios are taken within a round. The cluster keeps accounts (sacct
answers), without which theirs never learns of a killed cell; `faults` has both.

Usage: python bench/slurm.py [ROUNDS] [grid|submit|rpcs|faults|faults:TEXT ...]; TEXT picks the faults that hold it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import ROOT, machine, spread, write_result
from slurm_faults import measure_faults
from slurm_ways import THEIR_PACKAGE, Cluster, Way, cluster, our_way, their_way, until

GRID = ("delay.S=1,4", "optimizer.lr=1e-4,1e-3,1e-2")
CELLS = 6
MANY = 1000
GRID_LIMIT_S, SUBMIT_LIMIT_S = 300, 900
SLEEPERS, WINDOW_S = 20, 60


def alternating(
    ways: list[Way], rounds: int, measure: Callable[[Way, Path], float | None]
) -> list[dict[str, float | None]]:
    """What `measure` finds for every way in every round, each in a new folder."""
    found = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="sb-") as folder:
            order = ways[:: 1 if number % 2 == 0 else -1]
            found.append({way.name: measure(way, Path(folder) / str(place)) for place, way in enumerate(order)})
        print(f"round {number + 1}: {found[-1]}", flush=True)
    return found


def summary(rounds: list[dict[str, float | None]]) -> dict[str, Any]:
    """Spread of each way, and of theirs over each of ours; null where a way was not measured."""
    names = list(dict.fromkeys(name for one in rounds for name in one))
    found: dict[str, Any] = {"rounds": len(rounds)}
    for name in names:
        values = [one[name] for one in rounds if one[name] is not None]
        found[f"{name}, s"] = spread(values) if values else None
    for name in sorted(set(names) - {"theirs"}):
        pairs = [(one.get("theirs"), one[name]) for one in rounds]
        ratios = [theirs / ours for theirs, ours in pairs if theirs is not None and ours is not None]
        found[f"theirs over {name}"] = spread(ratios) if ratios else None
    return found


def measure_grid(where: Cluster, ways: list[Way], rounds: int) -> dict[str, Any]:
    """Seconds of a whole sweep."""

    def seconds(way: Way, folder: Path) -> float | None:
        launch = way.start(where, folder, *GRID)
        code = launch.wait(GRID_LIMIT_S)
        took = time.monotonic() - launch.began
        launch.end()
        where.clear()
        if code != 0 or way.completed(folder) != CELLS:
            raise RuntimeError(f"{way.name}: exit {code}\n" + "\n".join(line for _, line in launch.lines[-20:]))
        return took

    quick = our_way("hydra.launcher.poll_s=1", name="ours with poll_s=1")
    return {"cells": CELLS, **summary(alternating([ways[0], quick, *ways[1:]], rounds, seconds))}


def measure_submit(where: Cluster, ways: list[Way], rounds: int) -> dict[str, Any]:
    """Seconds from the command to the last job in the queue; nothing may start. Theirs cannot detach and is ended."""

    def seconds(way: Way, folder: Path) -> float | None:
        detach = ["hydra.launcher.wait=false"] if way.name == "ours" else []
        launch = way.start(where, folder, f"seed=range(0,{MANY})", *detach)
        until(lambda: where.waiting() >= MANY or launch.process.poll() is not None, SUBMIT_LIMIT_S)
        took, complete = time.monotonic() - launch.began, where.waiting() == MANY
        returned = launch.wait(30 if detach else 0)
        if detach and returned is not None:
            took = launch.lines[-1][0] - launch.began
        launch.end()
        where.clear()
        return took if complete else None

    where.command("scontrol", "update", "partition=gpu", "state=down")
    try:
        return {"jobs": MANY, "limit_s": SUBMIT_LIMIT_S, **summary(alternating(ways, rounds, seconds))}
    finally:
        where.command("scontrol", "update", "partition=gpu", "state=up")


def measure_rpcs(where: Cluster, ways: list[Way]) -> dict[str, Any]:
    """Requests by kind in a minute of waiting, from just after the jobs began; and with nobody waiting."""
    found: dict[str, Any] = {"jobs": SLEEPERS, "window_s": WINDOW_S}
    for way in ways:
        with tempfile.TemporaryDirectory(prefix="sb-") as folder:
            sleep = f'{way.job_setup}=["sleep 900"]'
            launch = way.start(where, Path(folder) / "sweep", f"seed=range(0,{SLEEPERS})", sleep)
            until(lambda: where.waiting() == SLEEPERS, 120)
            time.sleep(5)
            found[way.name] = requests(where)
            if way is ways[-1]:
                launch.end()
                found["nobody"] = requests(where)
            launch.end()
            where.clear()
    return found


def requests(where: Cluster) -> dict[str, Any]:
    """Requests that came in during the window, apart from those that ask for the numbers."""
    where.command("sdiag", "--reset")
    where.command("sacctmgr", "-i", "clear", "stats")
    time.sleep(WINDOW_S)
    controller = counts(where.command("sdiag"), without=("STATS",))
    accounts = counts(where.command("sacctmgr", "show", "stats"), without=("STATS", "PERSIST_INIT", "FINI"))
    scale = 60 / WINDOW_S
    return {
        "controller, a minute": round(sum(controller.values()) * scale, 1),
        "accounting, a minute": round(sum(accounts.values()) * scale, 1),
        "controller": controller,
        "accounting": accounts,
    }


def counts(text: str, without: tuple[str, ...]) -> dict[str, int]:
    """Count by type of message in what `sdiag` and `sacctmgr show stats` print."""
    part = text.partition("by message type")[2].partition("by user")[0]
    lines = re.findall(r"(\w+)\s*\(\s*\d+\) count:(\d+)", part)
    return {name: int(count) for name, count in lines if not any(word in name for word in without)}


def stored() -> dict[str, Any]:
    """Parts measured before, so that one can be measured again alone."""
    path = ROOT / "bench" / "results" / "slurm.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found.pop("machine", None)
    return found


def main(rounds: int, wanted: list[str]) -> None:
    """Measure the parts that are asked for and write the result after each."""
    if os.geteuid() != 0 or shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        print("bench/slurm.py needs root and Slurm's daemons (see slurm/testcluster): nothing is measured")
        return
    # In the background of a shell SIGINT is ignored, and launchers would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="sb-") as target, cluster(accounts=True) as where:
        theirs = their_way(Path(target))
        ways = [our_way(), *([theirs] if theirs else [])]
        parts: dict[str, Callable[[str], dict[str, Any]]] = {
            "grid": lambda _: measure_grid(where, ways, rounds),
            "submit": lambda _: measure_submit(where, ways, max(1, rounds // 2)),
            "rpcs": lambda _: measure_rpcs(where, ways),
            "faults": lambda text: measure_faults(where, ways, text),
        }
        for name, _, text in (word.partition(":") for word in wanted or parts):
            # A part has the machine's state of its own time.
            result = {"load_average": machine()["load_average"], **parts[name](text)}
            if text:
                result = stored().get(name, {}) | result
            write_result("slurm", {"theirs": THEIR_PACKAGE if theirs else None, **stored(), name: result})


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    main(numbers[0] if numbers else 3, [word for word in sys.argv[1:] if not word.isdigit()])
