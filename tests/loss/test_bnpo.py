"""BNPO: hand-computed values, and every token counting the same."""

from __future__ import annotations

import pytest
import torch


def test_golden(make_loss, hand_batch, grade):
    # The token losses of GRPO's golden: −1.2, −.5 and 1.6, 2, 4; their sum 5.9 over 5 tokens. Gradients over 5.
    graded = grade(make_loss("bnpo", epsilon=0.2), hand_batch())
    assert graded.loss == pytest.approx(1.18, rel=1e-6)
    expected = torch.tensor([[0, -0.1, 0], [0, 0.4, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


def test_long_and_short_sequences_weigh_their_tokens(make_loss, random_inputs, grade):
    inputs = random_inputs(spread=0)
    graded = grade(make_loss("bnpo"), inputs)
    tokens = inputs.mask_BT.sum()
    expected = -inputs.advantage_B[:, None] * inputs.mask_BT / tokens
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


def test_one_batch_makes_it_dapo(make_loss, random_inputs, grade):
    inputs = random_inputs()
    one, other = grade(make_loss("bnpo", beta=0.1), inputs), grade(make_loss("dapo", beta=0.1), inputs)
    assert one.loss == other.loss
    assert torch.equal(one.grad_BT, other.grad_BT)
