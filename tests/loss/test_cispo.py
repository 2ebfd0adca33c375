"""CISPO: hand-computed values, and a capped token that still pulls."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError


def test_golden(make_loss, hand_batch, grade):
    # w = min(r, 1.5) = [1.5, .5], [.5, 1, 1.5]; −w A log θ = [1.5, 1], [−1, −6, −1.5]; sum −6 over 5 tokens.
    # Gradient −w A / 5: [−1.5, −.5] / 5 and [1, 2, 3] / 5. Capped: r = 2 in both rows.
    graded = grade(make_loss("cispo", epsilon_high=1.5), hand_batch())
    assert graded.loss == pytest.approx(-1.2, rel=1e-6)
    expected = torch.tensor([[-0.3, -0.1, 0], [0.2, 0.4, 0.6]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)
    assert graded.value.clip_high_BT.tolist() == [[True, False, False], [False, False, True]]
    assert not graded.value.clip_low_BT.any()


def test_without_cap_the_gradient_is_the_ratio_times_advantage(make_loss, random_inputs, grade):
    inputs = random_inputs()
    graded = grade(make_loss("cispo", epsilon_high=math.inf), inputs)
    weighted = inputs.log_ratio_BT.exp() * inputs.advantage_B[:, None] * inputs.mask_BT
    torch.testing.assert_close(graded.grad_BT, -weighted / inputs.mask_BT.sum(), rtol=1e-6, atol=1e-9)


def test_small_cap_scales_every_on_policy_gradient(make_loss, random_inputs, grade):
    inputs = random_inputs(spread=0)
    capped, free = (grade(make_loss("cispo", epsilon_high=cap), inputs) for cap in (0.2, 5))
    torch.testing.assert_close(capped.grad_BT, 0.2 * free.grad_BT)


@pytest.mark.parametrize("cap", [0, -1, math.nan])
def test_refused(make_loss, cap):
    with pytest.raises(OptionError, match="5 is canonical"):
        make_loss("cispo", epsilon_high=cap)
