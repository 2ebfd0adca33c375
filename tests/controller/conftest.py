"""Tiny runs of cells with controllers."""

import pytest
import torch

from stalefront.batch import LossInputs, Update
from stalefront.controller import Step
from stalefront.paths import CellPaths
from stalefront.record import WALL_CLOCK

TINY = {
    "steps": 8,
    "model.warmup.steps": 200,
    "model.warmup.batch_size": 64,
    "optimizer.warmup_steps": 0,
    "validation.num_samples": 8,
}


@pytest.fixture
def tiny(make_cell):
    """`tiny(controller=["gac"], **overrides)`: a cell of eight steps, two batches of four."""
    return lambda **overrides: make_cell(**TINY | overrides)


@pytest.fixture
def continued(run_in, tmp_path, numbers):
    """`continued(cell)`: rows of the cell in one go; its continuation from a checkpoint must have the same."""

    def run(cell):
        whole = run_in(tmp_path / "whole", cell, checkpoint_every=3)
        assert whole.outcome["state"] == "completed", whole.outcome["error"]
        lines = whole.paths.steps.read_text().splitlines(keepends=True)
        paths = CellPaths(tmp_path / "parts")
        paths.checkpoint.parent.mkdir(parents=True)
        paths.checkpoint.write_bytes(whole.paths.checkpoint.read_bytes())
        paths.steps.write_text("".join(lines))
        ran = run_in(paths.root, cell, checkpoint_every=3, attempt=2)
        assert ran.outcome["resumed_from_step"] == 6
        assert numbers(ran.rows) == numbers(whole.rows)
        assert ran.outcome["warnings"] == whole.outcome["warnings"]
        return whole.rows

    return run


@pytest.fixture
def shared():
    """`shared(rows, prefix)`: every column but the wall-clock ones and those of one controller, as text."""
    return lambda rows, prefix: [
        {k: repr(v) for k, v in row.items() if k not in WALL_CLOCK and not k.startswith(prefix)} for row in rows
    ]


@pytest.fixture
def make_step(random_inputs):
    """`make_step(gradient=…, previous=…)`: what a controller sees."""

    def make(step=1, *, inputs: LossInputs | None = None, gradient=None, previous=None, first=False, new=False):
        vector = [None if v is None else torch.tensor(v) for v in (gradient, previous)]
        return Step(step, random_inputs() if inputs is None else inputs, *vector, first, new)

    return make


@pytest.fixture
def make_update():
    """`make_update(cos=0.5)`: an applied update with that cosine."""

    def make(cos=None, cap_factor=1.0):
        return Update(1.0, 1.0, 1.0, True, True, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, cos, None, cap_factor)

    return make
