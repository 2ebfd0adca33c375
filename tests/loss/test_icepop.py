"""IcePop as a loss: hand-computed values, the unbanded special case, and prime-rl's numbers."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError


def test_golden(make_loss, hand_batch, grade):
    # r = [2, ½], [½, 1, 2] in [.4, 1.5]: −A r = [·, −½], [1, 2, ·], which is also the gradient; over 5 tokens.
    graded = grade(make_loss("icepop", low=0.4, high=1.5), hand_batch())
    assert graded.loss == pytest.approx(2.5 / 5, rel=1e-6)
    expected = torch.tensor([[0, -0.1, 0], [0.2, 0.4, 0]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)
    assert graded.value.clip_high_BT.tolist() == [[True, False, False], [False, False, True]]
    assert not graded.value.clip_low_BT.any()


def test_without_band_it_is_importance_sampling(make_loss, random_inputs, grade):
    inputs = random_inputs(spread=3)
    one, other = grade(make_loss("icepop", low=0, high=math.inf), inputs), grade(make_loss("importance"), inputs)
    assert one.loss == other.loss
    assert torch.equal(one.grad_BT, other.grad_BT)


def test_inside_the_band_the_gradient_is_that_of_rollout_is(make_loss, random_inputs, grade):
    inputs = random_inputs(spread=2)
    one = grade(make_loss("icepop", low=0.5, high=3), inputs)
    other = grade(make_loss("rollout_is", epsilon_low=0.5, epsilon_high=2, bounds="inclusive"), inputs)
    torch.testing.assert_close(one.grad_BT, other.grad_BT)


@pytest.mark.parametrize("case", ["icepop_02_5", "edge_02_5"])
def test_prime_rl(case, agrees):
    agrees(f"prime_rl_tip__IcePopLoss__{case}", "icepop")


@pytest.mark.parametrize(("field", "value"), [("low", 1.1), ("high", 0.9)])
def test_refused(make_loss, field, value):
    with pytest.raises(OptionError, match=f"loss.{field}"):
        make_loss("icepop", **{field: value})
