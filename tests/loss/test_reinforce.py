"""REINFORCE: hand-computed values, and no ratio anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch


def test_golden(make_loss, hand_batch, grade):
    # −A log θ = [1, 2] and [−2, −6, −1]; means 1.5 and −3; their mean −.75. Gradient −A / (2 |y|): −1/4 and 2/6.
    graded = grade(make_loss("reinforce"), hand_batch())
    assert graded.loss == pytest.approx(-0.75, rel=1e-6)
    expected = torch.tensor([[-0.25, -0.25, 0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)
    assert not (graded.value.clip_low_BT | graded.value.clip_high_BT).any()


def test_old_policy_does_not_enter(make_loss, random_inputs, grade):
    inputs = random_inputs()
    other = replace(inputs, logp_old_BT=inputs.logp_old_BT - 3, logp_behav_BT=inputs.logp_behav_BT - 3)
    one, moved = grade(make_loss("reinforce"), inputs), grade(make_loss("reinforce"), other)
    assert one.loss == moved.loss
    assert torch.equal(one.grad_BT, moved.grad_BT)
    assert make_loss("reinforce").ratio is None
