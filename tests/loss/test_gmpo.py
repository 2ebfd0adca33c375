"""GMPO: hand-computed values, the token-level special case, and verl's numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stalefront.choice import OptionError

LN2 = math.log(2)


def test_golden(make_loss, hand_batch, grade):
    # In units of ln 2: l = [1, −1] with A = 1, ε₊ = ½: [½, −1], mean −¼; l = [−1, 1, 0] with A = −2, ε₋ = ¼:
    # [−¼, 1, 0], mean ¼. Losses −2^−¼ and 2·2^¼, mean over 2. Gradient of a token that is not clipped: loss / |y| / 2.
    loss = make_loss("gmpo", epsilon=LN2 / 4, epsilon_high=LN2 / 2)
    graded = grade(loss, hand_batch(ratio=((2, 0.5), (0.5, 2, 1))))
    good, bad = -(2**-0.25), 2 * 2**0.25
    assert graded.loss == pytest.approx((good + bad) / 2, rel=1e-6)
    expected = torch.tensor([[0, good / 4, 0], [0, bad / 6, bad / 6]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)
    assert graded.value.clip_high_BT.tolist() == [[True, False, False], [False] * 3]
    assert graded.value.clip_low_BT.tolist() == [[False] * 3, [True, False, False]]


def test_one_token_sequences_make_it_grpo(make_loss, random_inputs, grade):
    inputs = random_inputs(width=1, rows=8)
    widths = {"epsilon": -math.log(0.8), "epsilon_high": math.log(1.2)}
    one, other = grade(make_loss("gmpo", **widths), inputs), grade(make_loss("grpo", epsilon=0.2), inputs)
    assert one.loss == pytest.approx(other.loss, rel=1e-9)
    torch.testing.assert_close(one.grad_BT, other.grad_BT)
    assert torch.equal(one.value.clip_high_BT, other.value.clip_high_BT)


def test_a_token_without_advantage_is_not_in_the_ratio(make_loss, hand_batch):
    batch = hand_batch()
    advantage = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    value = make_loss("gmpo", epsilon=9).surrogate(replace(batch, advantage_B=advantage))
    # Mean advantage 1, mean log-ratio (ln 2)/2.
    assert value.token_loss_BT[:, 0].tolist() == pytest.approx([-math.sqrt(2), 0.0])


def test_verl(agrees):
    agrees("verl__geo_mean__eps04", "gmpo", rtol=1e-8)


@pytest.mark.parametrize("field", ["epsilon", "epsilon_high"])
def test_refused(make_loss, field):
    with pytest.raises(OptionError, match=f"loss.{field}"):
        make_loss("gmpo", **{field: -0.1})
