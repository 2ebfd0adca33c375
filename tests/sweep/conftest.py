"""Helpers for the sweep: the command in this process and in one of its own, and what it leaves behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from stalefront.app import run
from stalefront.compose import Composer
from stalefront.files import read_json
from stalefront.resolvers import register_resolvers
from stalefront.slurm.profile import register_profiles
from stalefront.sweepfiles import NamedSweep, register_sweeps

COMMAND = Path(__file__).parents[2] / "sweep.py"
# A cell of about a second after a warm-up of half a second.
SMALL = (
    *("steps=8", "model.warmup.steps=10", "model.warmup.batch_size=16", "validation.num_samples=16"),
    *("task.num_prompts=2", "task.num_generations=4"),
)


class Sweep:
    """One sweep directory and the commands that are run on it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def arguments(self, *arguments: str) -> list[str]:
        return ["-m", "sweep=null", *SMALL, f"hydra.sweep.dir={self.root}", *arguments]

    def run(self, *arguments: str) -> int:
        """In this process: the pool's parent, and with it the imports, are shared by all tests."""
        return run(self.arguments("hydra.launcher.report=false", *arguments))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """In a process of its own, for what signals do to it."""
        command = [sys.executable, str(COMMAND), *self.arguments(*arguments)]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.root.parent,
            start_new_session=True,
        )

    def cells(self) -> dict[str, Path]:
        """Folder of every planned cell by its overrides that are not those of every test."""
        plan = read_json(self.root / "plan.json")
        return {
            " ".join(o for o in entry["overrides"] if o not in SMALL): self.root / "cells" / cell_id
            for cell_id, entry in plan["cells"].items()
        }

    def outcomes(self) -> dict[str, dict[str, Any]]:
        return {name: read_json(folder / "outcome.json") for name, folder in self.cells().items()}

    def claims(self) -> dict[str, int]:
        return {name: len(list(folder.glob("claim.*"))) for name, folder in self.cells().items()}


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path / "sweep")


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    """Overrides that make a cell small."""
    return SMALL


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def wait_for() -> Callable[..., Any]:
    """`wait_for(get, timeout=30)`: what `get()` gives as soon as it is true."""

    def wait(get: Callable[[], Any], timeout: float = 60) -> Any:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = get()
            if found:
                return found
            time.sleep(0.02)
        raise TimeoutError(f"{get} did not come true in {timeout} s")

    return wait


def make_composer(*overrides: str) -> Composer:
    register_resolvers()
    register_sweeps()
    register_profiles()
    with initialize_config_module("stalefront.conf", version_base="1.3"):
        master = compose("config", overrides=list(overrides), return_hydra_config=True)
        return Composer(GlobalHydra.instance().config_loader(), master)


@pytest.fixture(scope="session")
def composer() -> Composer:
    """A composer over `conf/`; what it composed for one test it has for the next."""
    return make_composer()


@pytest.fixture(scope="session")
def named_sweep() -> Callable[[str], NamedSweep]:
    """`named_sweep("smoke")`: the sweep as the command line composes it."""
    return lambda name: NamedSweep.from_config(make_composer(f"sweep={name}")._master.sweep)
