"""Kimi: hand-computed values, a penalty that acts alone, and ROLL's numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stalefront.choice import OptionError

LN2 = math.log(2)


def test_golden(make_loss, hand_batch, grade):
    # −A log θ = [1, 2], [−2, −6, −1]; (τ/2) l² = τ/2 (ln 2)² where r ≠ 1; means (3 + 2p)/2 and (−9 + 2p)/3 with
    # p = ¼ (ln 2)², their mean. Gradient (−A + τ l)/(2 |y|).
    graded = grade(make_loss("kimi", tau=0.5), hand_batch())
    penalty = LN2**2 / 4
    assert graded.loss == pytest.approx(((3 + 2 * penalty) / 2 + (-9 + 2 * penalty) / 3) / 2, rel=1e-6)
    slopes = [[-1 + LN2 / 2, -1 - LN2 / 2, 0], [2 - LN2 / 2, 2, 2 + LN2 / 2]]
    expected = torch.tensor(slopes, dtype=torch.float64) / torch.tensor([[4.0], [6.0]])
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


def test_without_penalty_it_is_reinforce(make_loss, random_inputs, grade):
    inputs = random_inputs()
    one, other = grade(make_loss("kimi", tau=0), inputs), grade(make_loss("reinforce"), inputs)
    assert one.loss == other.loss
    assert torch.equal(one.grad_BT, other.grad_BT)


def test_the_penalty_pulls_to_the_anchor_without_advantage(make_loss, random_inputs, grade):
    inputs = random_inputs()
    inputs = replace(inputs, advantage_B=torch.zeros_like(inputs.advantage_B))
    step = -grade(make_loss("kimi"), inputs).grad_BT
    assert (step * inputs.log_ratio_BT <= 0).all()
    assert step[inputs.mask_BT].all()


def test_roll(agrees):
    agrees("roll__pg_kimi15__kimi15_tau01", "kimi", rtol=5e-9)


def test_refused(make_loss):
    with pytest.raises(OptionError, match=r"loss\.tau"):
        make_loss("kimi", tau=-1)
