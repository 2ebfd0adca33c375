"""Gradient accumulation: micro-batches of a learner step give the gradient of the whole, for every loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stalefront.batch import LossInputs
from stalefront.policy import token_logps
from stalefront.reduction import reduction_BT

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "loss").glob("*.yaml"))


def gradient(model, loss, inputs, tokens, position, pieces):
    share = reduction_BT(inputs.mask_BT, loss.reduction, max_completion_length=6)
    model.zero_grad()
    for rows in pieces:
        theta = token_logps(model, tokens[rows], position[rows], inputs.mask_BT[rows], temperature=1.0).logp_BT
        piece = {name: value[rows] for name, value in inputs.tensors().items()}
        loss(LossInputs(**(piece | {"logp_theta_BT": theta})), None, share[rows]).loss.backward()
    return torch.cat([p.grad.reshape(-1).double() for p in model.parameters()])


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_the_parameters(name, beta, make_loss, make_cell, random_inputs):
    options = make_cell().model
    model = options.build(options.tokenizer(), seed=0)
    inputs = random_inputs(rows=8, dtype=torch.float32)
    width = 3
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 16, (8, width + 5), generator=random)
    position = torch.arange(width + 5).expand(8, -1)
    pad = torch.nn.functional.pad
    wide = {name: pad(value, (width, 0)) for name, value in inputs.tensors().items() if name.endswith("_BT")}
    with torch.no_grad():
        theta = token_logps(model, tokens, position, wide["mask_BT"], temperature=1.0).logp_BT
    shift = theta - wide["logp_theta_BT"]
    moved = {name: value + shift for name, value in wide.items() if name.startswith("logp")}
    inputs = replace(inputs, **moved, mask_BT=wide["mask_BT"])
    loss, rows = make_loss(name, beta=beta), torch.arange(8)
    if loss.scope == "batch":
        return
    whole = gradient(model, loss, inputs, tokens, position, [rows])
    for parts in (2, 4, 8):
        split = gradient(model, loss, inputs, tokens, position, rows.chunk(parts))
        assert float((split - whole).norm() / whole.norm()) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_applied_updates(name, make_cell, completed):
    if make_cell(loss=name).loss.scope == "batch":
        return
    options = {"steps": 3, "loss": name, "delay.S": 3, "model.warmup.steps": 100, "loss.beta": 0.04}
    whole, split = (completed(make_cell(**options, **{"optimizer.grad_accum": parts}))[1:] for parts in (1, 4))
    for one, other in zip(whole, split, strict=True):
        assert other["version"] == one["version"] == one["step"]
        for column in ("grad_norm_raw", "grad_norm_applied", "update_norm", "dist_from_start", "kl_ref_k3_nats"):
            assert other[column] == pytest.approx(one[column], rel=1e-4, abs=1e-7), column
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-6)
