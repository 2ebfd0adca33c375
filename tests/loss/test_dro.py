"""DRO: hand-computed values, a penalty that acts alone, and verl's numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stalefront.choice import OptionError

LN2 = math.log(2)


def test_golden(make_loss, hand_batch, grade):
    # −A log θ = [1, 2], [−2, −6, −1]; (β/2) l² = β/2 (ln 2)² where r ≠ 1, four times; over 5 tokens.
    # Gradient (−A + β l)/5.
    graded = grade(make_loss("dro", dro_beta=0.5), hand_batch())
    assert graded.loss == pytest.approx((-6 + 4 * 0.25 * LN2**2) / 5, rel=1e-6)
    slopes = [[-1 + LN2 / 2, -1 - LN2 / 2, 0], [2 - LN2 / 2, 2, 2 + LN2 / 2]]
    expected = torch.tensor(slopes, dtype=torch.float64) / 5
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


def test_without_penalty_it_is_gpg(make_loss, random_inputs, grade):
    inputs = random_inputs()
    one, other = grade(make_loss("dro", dro_beta=0), inputs), grade(make_loss("gpg"), inputs)
    assert one.loss == other.loss
    assert torch.equal(one.grad_BT, other.grad_BT)


def test_the_penalty_pulls_to_the_anchor_without_advantage(make_loss, random_inputs, grade):
    inputs = random_inputs()
    inputs = replace(inputs, advantage_B=torch.zeros_like(inputs.advantage_B))
    step = -grade(make_loss("dro"), inputs).grad_BT
    assert (step * inputs.log_ratio_BT <= 0).all()
    assert step[inputs.mask_BT].all()


def test_verl(agrees):
    agrees("verl__dro__beta01", "dro")


def test_refused(make_loss):
    with pytest.raises(OptionError, match=r"loss\.dro_beta"):
        make_loss("dro", dro_beta=-1)
