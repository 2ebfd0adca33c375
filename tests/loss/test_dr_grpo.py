"""Dr. GRPO: hand-computed values, and no length in the weight of a token."""

from __future__ import annotations

import pytest
import torch


def test_golden(make_loss, hand_batch, grade):
    # The token losses of GRPO's golden sum to 5.9; over B · L = 2 · 6. Gradients over 12.
    graded = grade(make_loss("dr_grpo", epsilon=0.2), hand_batch(), length=6)
    assert graded.loss == pytest.approx(5.9 / 12, rel=1e-6)
    expected = torch.tensor([[0, -0.5 / 12, 0], [0, 2 / 12, 4 / 12]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


def test_a_longer_limit_divides_alike(make_loss, random_inputs, grade):
    short, long = (grade(make_loss("dr_grpo"), random_inputs(), length=n) for n in (8, 16))
    assert long.loss == pytest.approx(short.loss / 2, rel=1e-6)
    torch.testing.assert_close(long.grad_BT, short.grad_BT / 2)
