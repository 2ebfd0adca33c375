"""A grid through the local launcher against the same cells in one interpreter each: wall seconds a cell.

Both run two cells at a time on one core each. A round runs both, in an order that alternates; ratios are taken within a
round. The grid is the corner of the default one that is cheapest to repeat; its cells are the default ones in full.

Usage: python bench/processes.py [ROUNDS]
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import ROOT, spread, write_result

S = (4, 16, 64)
LR = ("2.5e-4", "1e-3")
SEED = (0, 1)


def launcher(folder: Path) -> float:
    """Seconds for the grid as one sweep."""
    axes = [f"delay.S={','.join(map(str, S))}", f"optimizer.lr={','.join(LR)}", f"seed={','.join(map(str, SEED))}"]
    return _timed(["-m", "sweep=null", *axes, f"hydra.sweep.dir={folder}", "hydra.launcher.workers=2"])


def interpreters(folder: Path) -> float:
    """Seconds for the same cells, each started by hand, two at a time, into one directory."""
    jobs = [[f"delay.S={s}", f"optimizer.lr={lr}", f"seed={seed}"] for s, lr, seed in itertools.product(S, LR, SEED)]
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: _timed([*job, f"hydra.run.dir={folder}"]), jobs))
    return time.perf_counter() - start


def _timed(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, str(ROOT / "sweep.py"), *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main(rounds: int) -> None:
    """Measure and write the result."""
    cells = len(S) * len(LR) * len(SEED)
    pairs = []
    for number in range(rounds):
        ways = [("launcher", launcher), ("interpreters", interpreters)]
        with tempfile.TemporaryDirectory() as folder:
            pairs.append(
                {name: run(Path(folder) / name) / cells for name, run in ways[:: 1 if number % 2 == 0 else -1]}
            )
    write_result(
        "processes",
        {
            "rounds": rounds,
            "cells": cells,
            "interpreters over launcher, wall": spread([p["interpreters"] / p["launcher"] for p in pairs]),
            "launcher wall s a cell, report included": spread([p["launcher"] for p in pairs]),
            "interpreters wall s a cell": spread([p["interpreters"] for p in pairs]),
        },
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
