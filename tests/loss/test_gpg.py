"""GPG: hand-computed values, REINFORCE where all lengths agree, and verl's and NeMo-RL's numbers."""

from __future__ import annotations

import pytest
import torch


def test_golden(make_loss, hand_batch, grade):
    # −A log θ = [1, 2] and [−2, −6, −1]; their sum −6 over 5 tokens. Gradient −A/5.
    graded = grade(make_loss("gpg"), hand_batch())
    assert graded.loss == pytest.approx(-1.2, rel=1e-6)
    expected = torch.tensor([[-0.2, -0.2, 0], [0.4, 0.4, 0.4]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


def test_with_one_length_it_is_reinforce(make_loss, random_inputs, grade):
    inputs = random_inputs(width=1)
    one, other = grade(make_loss("gpg"), inputs), grade(make_loss("reinforce"), inputs)
    assert one.loss == pytest.approx(other.loss, rel=1e-6)
    torch.testing.assert_close(one.grad_BT, other.grad_BT)


def test_frameworks(agrees, behaviour_weight):
    agrees("verl__gpg__tis_seq", "gpg", weights=behaviour_weight(2, "sequence"))
    agrees("nemo_rl__ClippedPGLossFn__reinforce_is", "gpg", weights=behaviour_weight(5))
