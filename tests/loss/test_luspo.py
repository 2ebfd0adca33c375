"""LUSPO: hand-computed values, GSPO times a length, and TRL's numbers."""

from __future__ import annotations

import pytest
import torch


def test_golden(make_loss, hand_batch, grade):
    # GSPO's golden, s = ½ and 2, sequence losses −.5 and 4, times the lengths 2 and 3, over B = 2: (−1 + 12)/2.
    # Gradient of a token −sA/2.
    graded = grade(make_loss("luspo", epsilon=0.2), hand_batch(ratio=((0.5, 0.5), (2, 1, 4))))
    assert graded.loss == pytest.approx(5.5, rel=1e-6)
    expected = torch.tensor([[-0.25, -0.25, 0], [2, 2, 2]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


def test_with_one_length_it_is_gspo_times_that(make_loss, random_inputs, grade):
    inputs = random_inputs(rows=12)
    inputs = inputs.rows(inputs.mask_BT.sum(-1) == 3)
    assert len(inputs.mask_BT)
    one, other = (grade(make_loss(name, epsilon=0.1), inputs) for name in ("luspo", "gspo"))
    assert one.loss == pytest.approx(3 * other.loss, rel=1e-6)
    torch.testing.assert_close(one.grad_BT, 3 * other.grad_BT, rtol=1e-6, atol=1e-12)


def test_trl(agrees):
    agrees("trl__GRPOTrainer_compute_loss__luspo_seq", "luspo")
