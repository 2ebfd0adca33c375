"""Slots and the order of starting."""

from pathlib import Path

import pytest

from stalefront.choice import OptionError
from stalefront.compose import Planned
from stalefront.observe import observe
from stalefront.paths import CellPaths
from stalefront.pool import Task, cores, exit_text, make_slots, start_order


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


def test_slots_count_threads(make_task, monkeypatch):
    monkeypatch.setattr("stalefront.pool.cores", lambda: 4)
    slots = make_slots(None, [], [])
    three, two, eight = (make_task(threads=threads) for threads in (3, 2, 8))
    assert slots.take(three)
    assert not slots.take(two)
    slots.give_back(three)
    assert slots.take(eight), "a cell that wants more than there is gets all of it"
    assert not slots.take(make_task())
    slots.give_back(eight)
    assert slots.free == 4


def test_workers_count_cells(make_task):
    slots = make_slots(2, [], [])
    tasks = [make_task(threads=16, seed=seed) for seed in range(3)]
    assert [slots.take(task) for task in tasks] == [True, True, False]


def test_gpus_are_handed_out_one_by_one(make_task, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab")
    slots = make_slots(None, [1, 0], [])
    tasks = [make_task(seed=seed) for seed in range(3)]
    assert [slots.take(task) for task in tasks] == [True, True, False]
    assert [task.gpu for task in tasks[:2]] == ["GPU-ab", "4"]
    slots.give_back(tasks[1])
    assert slots.take(tasks[2])
    assert tasks[2].gpu == "4"
    with pytest.raises(OptionError, match=r"hydra\.launcher\.gpus = 2"):
        make_slots(None, [2], [])


def test_a_cell_bound_to_a_device_cannot_be_handed_another(make_task):
    with pytest.raises(OptionError, match="device = 'cuda:1'"):
        make_slots(None, [0], [make_task(device="cuda:1").planned])
    assert make_slots(None, [], [make_task(device="cuda:1").planned]).total == 1


def test_cores_are_at_least_one():
    assert cores() >= 1


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
