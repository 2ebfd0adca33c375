"""Importance sampling: hand-computed values, PPO without its clip, and SkyRL's numbers."""

from __future__ import annotations

import math

import pytest
import torch


def test_golden(make_loss, hand_batch, grade):
    # −r A = [−2, −½], [1, 2, 4], which is also the gradient; over 5 tokens.
    graded = grade(make_loss("importance"), hand_batch())
    assert graded.loss == pytest.approx(4.5 / 5, rel=1e-6)
    expected = torch.tensor([[-0.4, -0.1, 0], [0.2, 0.4, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


def test_it_is_ppo_without_clip(make_loss, random_inputs, grade):
    inputs = random_inputs(spread=3)
    one = grade(make_loss("importance"), inputs)
    other = grade(make_loss("dapo", epsilon=math.inf, anchor="theta/mu"), inputs)
    assert one.loss == other.loss
    assert torch.equal(one.grad_BT, other.grad_BT)


def test_skyrl(agrees):
    agrees("skyrl__importance_sampling_loss__tinker_sum", "importance", anchor="theta/old")
