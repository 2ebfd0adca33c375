"""Laws that every correction of `conf/correction/` keeps, and every ordered pair of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stalefront.batch import LossInputs
from stalefront.cell import make_choice
from stalefront.choice import OptionError
from stalefront.correction import chain

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "correction").glob("*.yaml"))
NAMES.remove("none")
# Every non-empty ordered selection of at most two.
LISTS = [*((name,) for name in NAMES), *itertools.permutations(NAMES, 2)]


@pytest.fixture(params=LISTS, ids="+".join)
def corrections(request, conf_choice):
    return [make_choice("correction", conf_choice("correction", name)) for name in request.param]


def rows_of(inputs: LossInputs, rows: torch.Tensor) -> LossInputs:
    return LossInputs(**{field: value[rows] for field, value in vars(inputs).items()})


def test_none_is_the_empty_list(conf_choice, random_inputs):
    assert not conf_choice("correction", "none")
    assert chain([], random_inputs()) is None


def test_on_policy_nothing_changes_to_the_last_bit(corrections, make_loss, random_inputs, grade):
    inputs = random_inputs(spread=0, dtype=torch.float32)
    inputs = replace(inputs, logp_behav_BT=inputs.logp_theta_BT)
    weights = chain(corrections, inputs)
    assert torch.equal(weights.weight_BT, torch.ones_like(weights.weight_BT))
    assert weights.keep_BT.all()
    assert weights.step_scale == 1
    loss = make_loss("reinforce", beta=0.1)
    plain, corrected = grade(loss, inputs), grade(loss, inputs, weights=weights)
    assert plain.loss == corrected.loss
    assert torch.equal(plain.grad_BT, corrected.grad_BT)


def test_it_acts_off_policy(corrections, random_inputs):
    inputs = random_inputs(spread=3.0)
    weights = chain(corrections, inputs)
    changed = weights.weight_BT[inputs.mask_BT] != 1
    assert changed.any() or not weights.keep_BT.all() or weights.step_scale != 1


def test_no_gradient_through_the_weights(corrections, make_loss, random_inputs, grade):
    inputs = random_inputs()
    live = replace(inputs, logp_theta_BT=inputs.logp_theta_BT.clone().requires_grad_())
    weights = chain(corrections, live)
    if all(correction.detached for correction in corrections):
        assert not weights.weight_BT.requires_grad
    # With constant weights the gradient is the weighted one and nothing more.
    loss = make_loss("reinforce")
    corrected = grade(loss, inputs, weights=weights)
    expected = grade(loss, inputs).grad_BT * weights.weight_BT.detach() * weights.keep_BT
    torch.testing.assert_close(corrected.grad_BT, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("junk", [0.0, -1e4, float("inf"), float("nan")])
def test_padding_is_inert(corrections, junk, random_inputs):
    inputs = random_inputs()
    mask = torch.nn.functional.pad(inputs.mask_BT, (2, 3))
    wide = {
        name: torch.nn.functional.pad(value, (2, 3)).masked_fill(~mask, junk)
        for name, value in vars(inputs).items()
        if name.startswith("logp")
    }
    one = chain(corrections, inputs)
    other = chain(corrections, LossInputs(**wide, advantage_B=inputs.advantage_B, mask_BT=mask))
    assert torch.equal(other.weight_BT[mask], one.weight_BT[inputs.mask_BT])
    assert torch.equal(other.keep_BT[mask], one.keep_BT[inputs.mask_BT])
    assert torch.isfinite(other.weight_BT).all()


def test_row_order_does_not_matter(corrections, random_inputs):
    inputs = random_inputs()
    order = torch.randperm(len(inputs.mask_BT), generator=torch.Generator().manual_seed(1))
    one, moved = chain(corrections, inputs), chain(corrections, rows_of(inputs, order))
    torch.testing.assert_close(moved.weight_BT, one.weight_BT[order], rtol=1e-12, atol=0)
    assert torch.equal(moved.keep_BT, one.keep_BT[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [100.0, -100.0, math.inf, -math.inf])
def test_finite_at_extremes(corrections, shift, dtype, random_inputs):
    inputs = random_inputs(dtype=dtype)
    moved = inputs.logp_theta_BT - shift
    inputs = replace(inputs, logp_old_BT=moved, logp_behav_BT=moved)
    weights = chain(corrections, inputs)
    assert torch.isfinite(weights.weight_BT).all()
    assert (weights.weight_BT >= 0).all()
    assert math.isfinite(weights.step_scale)


def test_pure(corrections, random_inputs):
    inputs = random_inputs()
    before = {name: value.clone() for name, value in vars(inputs).items()}
    one, other = chain(corrections, inputs), chain(corrections, inputs)
    assert torch.equal(one.weight_BT, other.weight_BT)
    assert all(torch.equal(value, before[name]) for name, value in vars(inputs).items())


@pytest.mark.parametrize("name", NAMES)
def test_a_second_ratio_is_refused(name, make_cell):
    with pytest.raises(OptionError, match=rf"correction\.{name}\.anchor"):
        make_cell(loss="grpo", correction=[name])
