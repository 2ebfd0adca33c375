"""SAPO: hand-computed values, a gate without sides, and four frameworks' numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stalefront.choice import OptionError


def test_golden(make_loss, hand_batch, grade):
    # σ(1) = .7310585786, σ(−½) = .3775406688. Row 0, A = 1, τ = 1: −4 σ(1), −4 σ(−½).
    # Row 1, A = −2, τ = 2: 4 σ(−1) = 4 (1 − σ(1)), 4 σ(0) = 2, 4 σ(2) = 3.5231883120.
    # Slopes −4 σ (1 − σ) r A: −8·.1966119332, −2·.2350037122; 4·.1966119332, 2, 16·.1049935854.
    graded = grade(make_loss("sapo", tau_pos=1.0, tau_neg=2.0), hand_batch())
    first, second = -4 * (0.7310585786 + 0.3775406688) / 2, (4 * 0.2689414214 + 2 + 3.5231883120) / 3
    assert graded.loss == pytest.approx((first + second) / 2, abs=1e-6)
    slopes = [[-1.5728954659 / 2, -0.4700074244 / 2, 0], [0.7864477330 / 3, 2 / 3, 1.6798973660 / 3]]
    torch.testing.assert_close(graded.grad_BT, torch.tensor(slopes, dtype=torch.float64) / 2, rtol=1e-6, atol=0)


def test_with_one_temperature_the_sign_only_turns_the_loss(make_loss, random_inputs, grade):
    loss, inputs = make_loss("sapo", tau_pos=1.3, tau_neg=1.3), random_inputs()
    one, other = grade(loss, inputs), grade(loss, replace(inputs, advantage_B=-inputs.advantage_B))
    assert one.loss == pytest.approx(-other.loss, rel=1e-12)
    torch.testing.assert_close(one.grad_BT, -other.grad_BT)


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("verl__sapo__default", {"clamp_nats": 20, "rtol": 5e-9}),
        ("skyrl__sapo_policy_loss__seq_mean", {"clamp_nats": 20, "rtol": 5e-8}),
        ("areal__sapo_loss_fn__default", {"reduction": "token_mean"}),
        # TRL holds the temperatures in single precision.
        ("trl__GRPOTrainer_compute_loss__sapo", {"rtol": 1e-7}),
    ],
)
def test_frameworks(file, options, agrees):
    agrees(file, "sapo", **options)


@pytest.mark.parametrize("field", ["tau_pos", "tau_neg"])
def test_refused(make_loss, field):
    with pytest.raises(OptionError, match=f"loss.{field}"):
        make_loss("sapo", **{field: 0})


def test_the_gate_on_sequences_by_hand(make_loss, hand_batch, grade):
    """r = [2, ½] has the geometric mean 1: the gate is at its centre, 4 σ(0) = 2, with slope 1, half of it a token."""
    batch = hand_batch(advantage=(1, 0))
    graded = grade(make_loss("sapo", level="sequence"), batch)
    assert graded.loss == pytest.approx(-2 / 2, rel=1e-12)
    torch.testing.assert_close(graded.grad_BT[0, :2], torch.full((2,), -1 / 2 / 2, dtype=torch.float64))


def test_one_token_sequences_have_one_level(make_loss, random_inputs, grade):
    inputs = random_inputs(width=1, rows=8)
    one, other = (
        grade(make_loss("sapo", level="sequence", advantage="sequence"), inputs),
        grade(make_loss("sapo"), inputs),
    )
    assert one.loss == pytest.approx(other.loss, rel=1e-12)
    torch.testing.assert_close(one.grad_BT, other.grad_BT)


def test_advantage_of_a_sequence_is_its_mean(make_loss, random_inputs, grade):
    inputs = random_inputs()
    own = torch.linspace(-1, 1, inputs.mask_BT.numel(), dtype=torch.float64).view(inputs.mask_BT.shape)
    mean = (own * inputs.mask_BT).sum(-1) / inputs.mask_BT.sum(-1)
    one = grade(make_loss("sapo", advantage="sequence"), replace(inputs, advantage_B=own))
    other = grade(make_loss("sapo"), replace(inputs, advantage_B=mean))
    assert one.loss == pytest.approx(other.loss, rel=1e-12)
    torch.testing.assert_close(one.grad_BT, other.grad_BT)
