"""The order of starting, and ends in words."""

from pathlib import Path

import pytest

from stalefront.compose import Planned
from stalefront.observe import observe
from stalefront.paths import CellPaths
from stalefront.pool import Task, exit_text, start_order


@pytest.fixture
def make_task(make_cell):
    def make(**overrides):
        cell = make_cell(**overrides)
        paths = CellPaths(Path("/nowhere") / cell.cell_id)
        return Task(
            Planned(cell, {}, tuple(f"{k}={v}" for k, v in overrides.items())), paths, observe(paths), "waiting"
        )

    return make


def test_one_cell_of_every_warm_up_starts_first_then_the_longest(make_task):
    tasks = [make_task(seed=seed, **{"delay.S": S}) for S in (8, 1, 4) for seed in (0, 1)]
    order = [(task.planned.cell.seed, task.planned.cell.S) for task in start_order(tasks)]
    assert order == [(0, 1), (1, 1), (0, 4), (1, 4), (0, 8), (1, 8)]
    tasks = [make_task(seed=0, **{"delay.S": S, "optimizer.lr": lr}) for S in (1, 4) for lr in (1e-3, 1e-4)]
    tasks.append(make_task(seed=1, **{"delay.S": 4}))
    order = [(task.planned.cell.seed, task.planned.cell.S) for task in start_order(tasks)]
    assert order == [(0, 1), (1, 4), (0, 1), (0, 4), (0, 4)]


def test_cells_without_a_warm_up_wait_for_nobody(make_task):
    tasks = [make_task(seed=0, **{"delay.S": S, "model.warmup": None}) for S in (4, 1)]
    assert [task.planned.cell.S for task in start_order(tasks)] == [1, 4]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "exit code 3"),
        (None, "how is not known"),
        (-9, "signal 9 (SIGKILL), which"),
        (-11, "signal 11 (SIGSEGV)"),
        (-99, "signal 99 (unknown)"),
    ],
)
def test_ends_in_words(code, text):
    assert exit_text(code).startswith(text)
