"""Our loop against TRL's trainer on the same cell: time a learner step, side by side in one process.

Each round runs both engines on the same cell, in an order that alternates; the ratio is taken within a round, so that
a slow minute of the machine counts for both. Imports, model building and warm-up are outside the clock: a cell of
`LONG` steps minus one of `SHORT` steps is what `LONG − SHORT` learner steps cost, rollouts and validation included.

Usage: python bench/engines.py [ROUNDS]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import cell_config, spread, write_result

from stalefront.cell import Cell
from stalefront.files import write_json
from stalefront.run import run_cell

SHORT, LONG = 8, 72


def seconds(engine: str, S: int, steps: int, root: Path) -> dict[str, float]:
    """Wall and CPU seconds of one cell."""
    config = cell_config(engine=engine, steps=steps)
    config["delay"]["S"] = S
    cell = Cell.from_config(config)
    folder = root / f"{engine}-{cell.cell_id}"
    shutil.rmtree(folder, ignore_errors=True)
    options = {"checkpoint_every": 10_000, "cache_dir": str(root / "cache")}
    write_json(folder / "config.json", {"cell_id": cell.cell_id, "cell": cell.as_dict(), "run": options})
    outcome = run_cell(folder)
    if outcome["state"] != "completed":
        raise SystemExit(f"{engine}: {outcome['error']}")
    return {"wall": outcome["wall_s"], "cpu": outcome["cpu_s"]}


def per_step(engine: str, S: int, root: Path) -> dict[str, float]:
    """Seconds a learner step."""
    short, long = (seconds(engine, S, steps, root) for steps in (SHORT, LONG))
    return {clock: (long[clock] - short[clock]) / (LONG - SHORT) for clock in short}


def main(rounds: int) -> None:
    """Measure and write the result."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for engine in ("native", "trl"):  # imports and warm-up, off the clock
            seconds(engine, 1, 1, root)
        for S in (1, 4):
            pairs = []
            for number in range(rounds):
                order = ("native", "trl") if number % 2 == 0 else ("trl", "native")
                pairs.append({engine: per_step(engine, S, root) for engine in order})
            result[f"S={S}"] = {
                "trl over native, cpu": spread([p["trl"]["cpu"] / p["native"]["cpu"] for p in pairs]),
                "trl over native, wall": spread([p["trl"]["wall"] / p["native"]["wall"] for p in pairs]),
                "native cpu ms a step": spread([1e3 * p["native"]["cpu"] for p in pairs]),
                "trl cpu ms a step": spread([1e3 * p["trl"]["cpu"] for p in pairs]),
            }
    write_result("engines", {"rounds": rounds, "steps": LONG - SHORT, "result": result})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
