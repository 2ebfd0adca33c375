"""GSPO: hand-computed values, and the token-level special case."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize(
    ("advantage", "loss", "grads", "clipped"),
    [
        # s = exp of the mean log-ratio: r = [½, ½] → ½; r = [2, 1, 4] → (ln 2 + 0 + 2 ln 2)/3 = ln 2 → 2.
        # A = 1, s = ½: −min(.5, .8) = −.5; A = −2, s = 2: −min(−4, −2.4) = 4; mean 1.75.
        # Gradient of a token: −sA / (2 |y|) = −.5/4 and 4/6.
        ((1, -2), 1.75, (-0.125, 2 / 3), (False, False)),
        # A = −1, s = ½: −min(−.5, −.8) = .8, clipped low; A = 2, s = 2: −min(4, 2.4) = −2.4, clipped high.
        ((-1, 2), -0.8, (0.0, 0.0), (True, True)),
    ],
)
def test_golden(make_loss, hand_batch, grade, advantage, loss, grads, clipped):
    batch = hand_batch(ratio=((0.5, 0.5), (2, 1, 4)), advantage=advantage)
    graded = grade(make_loss("gspo", epsilon=0.2), batch)
    assert graded.loss == pytest.approx(loss, rel=1e-6)
    expected = torch.tensor([[grads[0]] * 2 + [0], [grads[1]] * 3], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)
    assert graded.value.clip_low_BT[0].tolist() == [clipped[0]] * 3
    assert graded.value.clip_high_BT[1].tolist() == [clipped[1]] * 3


def test_one_token_sequences_make_it_grpo(make_loss, random_inputs, grade):
    inputs = random_inputs(width=1, rows=8)
    for options in ({}, {"beta": 0.1}, {"epsilon": 0.05, "delta": 1.2}):
        one, other = grade(make_loss("gspo", **options), inputs), grade(make_loss("grpo", **options), inputs)
        assert one.loss == pytest.approx(other.loss, rel=1e-12)
        torch.testing.assert_close(one.grad_BT, other.grad_BT)
        assert torch.equal(one.value.clip_high_BT, other.value.clip_high_BT)


def test_one_advantage_one_gradient(make_loss, random_inputs, grade):
    inputs = random_inputs()
    grads = grade(make_loss("gspo", epsilon=10), inputs).grad_BT
    for row, mask in zip(grads, inputs.mask_BT, strict=True):
        assert row[mask].unique().numel() == 1
