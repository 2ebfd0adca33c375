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


def test_gpus_are_handed_out_one_by_one(make_cell, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab")
    slots, cell = make_slots(None, [1, 0], []), make_cell(threads=16)
    assert [slots.take(cell), slots.take(cell)] == ["GPU-ab", "4"]
    assert not slots.fits(cell)
    slots.give_back(cell, "4")
    assert slots.take(cell) == "4"
    with pytest.raises(OptionError, match=r"hydra\.launcher\.gpus = 2"):
        make_slots(None, [2], [])


def test_a_cell_bound_to_a_device_cannot_be_handed_another(make_cell):
    bound = make_cell(device="cuda:1")
    with pytest.raises(OptionError, match="device = 'cuda:1'"):
        make_slots(None, [0], [bound])
    assert make_slots(None, [], [bound]).total == 1


def test_cores_are_at_least_one():
    assert cores() >= 1
