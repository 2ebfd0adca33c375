"""TOPR: hand-computed values, its two halves, and ROLL's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stalefront.choice import OptionError


def test_golden(make_loss, hand_batch, grade):
    # Row 0, reward 1: −2 A log θ = [2, 4]. Row 1, reward 0: w = ½ clamp(r, 0, 1) = [¼, ½, ½]; −w A log θ =
    # [−½, −3, −½].
    # Means 3 and −4/3, their mean. Gradient −w A/(2 |y|).
    loss = make_loss("topr", positive_weight=2, negative_weight=0.5)
    graded = grade(loss, hand_batch())
    assert graded.loss == pytest.approx((3 - 4 / 3) / 2, rel=1e-6)
    expected = torch.tensor([[-0.5, -0.5, 0], [0.5 / 6, 1 / 6, 1 / 6]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)
    assert graded.value.clip_high_BT.tolist() == [[False] * 3, [False, False, True]]
    assert loss.on_policy == "other"


def test_on_policy_the_two_kinds_keep_their_weights(make_loss, hand_batch, grade):
    ones = hand_batch(ratio=((1, 1), (1, 1, 1)))
    graded = grade(make_loss("topr", positive_weight=2, negative_weight=0.5), ones)
    expected = torch.tensor([[-0.5, -0.5, 0], [1 / 6] * 3], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("reward", "name", "options"),
    [(1.0, "reinforce", {}), (0.0, "cispo", {"epsilon_high": 1})],
)
def test_each_half_is_another_loss(reward, name, options, make_loss, random_inputs):
    inputs = random_inputs()
    inputs = replace(inputs, reward_B=torch.full_like(inputs.reward_B, reward))
    ours, other = make_loss("topr").surrogate(inputs), make_loss(name, **options).surrogate(inputs)
    torch.testing.assert_close(ours.token_loss_BT, other.token_loss_BT, rtol=1e-14, atol=0)


def test_roll(agrees):
    agrees("roll__pg_topr__topr", "topr", rtol=5e-9)


def test_refused(make_loss):
    with pytest.raises(OptionError, match=r"loss\.negative_weight"):
        make_loss("topr", negative_weight=-1)
