"""Cost of each arm of `sweep=corrections` in a learner step, relative to plain GRPO on the same rollout batch.

Every arm trains a fresh copy of the default tiny cell under reuse with S = 64, so that one rollout batch serves all
timed steps and sampling is paid outside the clock: what is timed is the forward, the corrections, the loss, the
backward pass, the update and the columns. A round times every arm and plain GRPO before and after it; ratios are taken
within a round.

Usage: python bench/corrections.py [ROUNDS]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import ROOT, spread, write_result
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from stalefront.build import build
from stalefront.cell import Cell
from stalefront.compose import OUTSIDE
from stalefront.loop import Learner
from stalefront.resolvers import register_resolvers
from stalefront.slurm.profile import register_profiles
from stalefront.sweepfiles import register_sweeps

WARM, TIMED = 2, 24


def arms() -> list[str]:
    """Arms in the order of the sweep."""
    return list(OmegaConf.load(ROOT / "sweeps" / "corrections.yaml").axes.arm)


def cell_of(arm: str) -> Cell:
    """The default tiny cell with this arm."""
    register_resolvers()
    register_sweeps()
    register_profiles()
    overrides = ["~sweep", f"arm={arm}", "delay.S=64", "steps=64", "validation.every=64"]
    with initialize_config_module("stalefront.conf", version_base="1.3"):
        config = OmegaConf.to_container(compose("config", overrides=overrides), resolve=True)
    outside = {*OUTSIDE, "arm", "framework"}
    return Cell.from_config({key: value for key, value in config.items() if key not in outside})


def cpu_ms(cell: Cell, cache: Path) -> float:
    """CPU milliseconds of a learner step."""
    torch.set_num_threads(1)
    learner = Learner(cell, build(cell, cache))
    for _ in range(WARM):
        learner.advance()
    start = time.process_time()
    for _ in range(TIMED):
        learner.advance()
    return 1e3 * (time.process_time() - start) / TIMED


def main(rounds: int) -> None:
    """Measure and write the result."""
    cells = {arm: cell_of(arm) for arm in arms()}
    plain = cells["grpo"]
    ratios: dict[str, list[float]] = {arm: [] for arm in cells}
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        plain_ms = [cpu_ms(plain, cache)]
        for _ in range(rounds):
            for arm, cell in cells.items():
                own = cpu_ms(cell, cache)
                plain_ms.append(cpu_ms(plain, cache))
                ratios[arm].append(own / (sum(plain_ms[-2:]) / 2))
    over = {arm: spread(values) for arm, values in ratios.items()}
    ranked = dict(sorted(over.items(), key=lambda item: -item[1]["median"]))
    write_result(
        "corrections",
        {"rounds": rounds, "steps": TIMED, "grpo cpu ms a step": spread(plain_ms), "over grpo": ranked},
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
