"""Slots: cores, workers, devices."""

import pytest

from stalefront.choice import OptionError
from stalefront.slots import cores, make_slots


def test_slots_count_threads(make_cell, monkeypatch):
    monkeypatch.setattr("stalefront.slots.cores", lambda: 4)
    slots = make_slots(None, [], [])
    three, two, eight = (make_cell(threads=threads) for threads in (3, 2, 8))
    slots.take(three)
    assert not slots.fits(two)
    slots.give_back(three, None)
    assert slots.fits(eight), "a cell that wants more than there is gets all of it"
    slots.take(eight)
    assert not slots.fits(make_cell())
    slots.give_back(eight, None)
    assert slots.free == 4


def test_workers_count_cells(make_cell):
    slots, cell = make_slots(2, [], []), make_cell(threads=16)
    for fits in (True, True, False):
        assert slots.fits(cell) == fits
        assert slots.take(cell) is None


def with_devices(monkeypatch, count):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)


def test_gpus_are_handed_out_one_by_one(make_cell, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab")
    with_devices(monkeypatch, 2)
    cell = make_cell(device="cuda", threads=16)
    slots = make_slots(None, [1, 0], [cell])
    assert [slots.take(cell), slots.take(cell)] == ["GPU-ab", "4"]
    assert not slots.fits(cell)
    slots.give_back(cell, "4")
    assert slots.take(cell) == "4"
    with_devices(monkeypatch, 3)
    with pytest.raises(OptionError, match=r"hydra\.launcher\.gpus = 2"):
        make_slots(None, [2], [cell])


@pytest.mark.parametrize(
    ("device", "gpus", "count", "part"),
    [
        ("cpu", [0], 4, "All cells have device=cpu: add device=cuda"),
        ("cuda", [7], 4, "indices of CUDA devices that are here: 0, 1, 2, 3"),
        ("cuda", [0, -1], 1, "that are here: 0."),
        ("cuda", ["GPU-ab"], 0, "that are here: none"),
    ],
)
def test_gpus_that_nobody_uses_or_that_are_not_here_are_refused(make_cell, monkeypatch, device, gpus, count, part):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with_devices(monkeypatch, count)
    with pytest.raises(OptionError, match=r"hydra\.launcher\.gpus = \[") as error:
        make_slots(None, gpus, [make_cell(device=device)])
    assert part in str(error.value)


def test_gpus_are_for_the_cells_that_want_one(make_cell, monkeypatch):
    with_devices(monkeypatch, 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert make_slots(None, [0], [make_cell(), make_cell(device="cuda")]).gpus == ["0"]


def test_a_cell_bound_to_a_device_cannot_be_handed_another(make_cell, monkeypatch):
    with_devices(monkeypatch, 2)
    bound = make_cell(device="cuda:1")
    with pytest.raises(OptionError, match="device = 'cuda:1'"):
        make_slots(None, [0], [bound])
    assert make_slots(None, [], [bound]).total == 1


def test_cores_are_at_least_one():
    assert cores() >= 1
