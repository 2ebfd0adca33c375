"""Shared surrogates by hand: the KL estimate, the sequence ratio, and the three regions of the clip."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.surrogate import (
    clamped_weight,
    clipped,
    gradient_carrier,
    kl_k3_BT,
    policy_gradient,
    sequence_log_ratio_B1,
    value_capped,
    weighted_logp,
)


@pytest.mark.parametrize(
    ("ratio", "value", "slope"),
    [
        # d = log ref/θ, k3 = e^d − d − 1, ∂k3/∂log θ = 1 − e^d
        (1.0, 0.0, 0.0),
        (2.0, 1 - math.log(2), -1.0),
        (0.5, math.log(2) - 0.5, 0.5),
    ],
)
def test_k3(ratio, value, slope):
    theta = torch.tensor([[-1.5]], dtype=torch.float64, requires_grad=True)
    kl = kl_k3_BT(theta, theta.detach() + math.log(ratio))
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, abs=1e-12)
    assert theta.grad.item() == pytest.approx(slope, abs=1e-12)


def test_k3_is_the_divergence_on_average():
    # Σ p k3 = KL(p ‖ q) + Σ q − 1, exactly, for any two distributions.
    p, q = (
        torch.softmax(torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(s)), 0)
        for s in (0, 1)
    )
    assert (p * kl_k3_BT(p.log(), q.log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item())
    assert (kl_k3_BT(p.log(), q.log()) >= 0).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "side"),
    [
        # −min(rA, clip(r, .8, 1.2) A); the slope with respect to log r is −rA, or 0 where the clip is active
        (1.1, 1.0, -1.1, -1.1, ""),
        (1.5, 1.0, -1.2, 0.0, "high"),
        (0.5, 1.0, -0.5, -0.5, ""),
        (0.5, -1.0, 0.8, 0.0, "low"),
        (1.5, -1.0, 1.5, 1.5, ""),
        (1.5, 0.0, 0.0, 0.0, ""),
    ],
)
def test_clip(ratio, advantage, value, slope, side):
    log_ratio = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    got = clipped(log_ratio, torch.tensor([[advantage]]), epsilon_low=0.2, epsilon_high=0.2, delta=None)
    got.token_loss_BT.sum().backward()
    assert got.token_loss_BT.item() == pytest.approx(value)
    assert log_ratio.grad.item() == pytest.approx(slope)
    assert (got.clip_low_BT.item(), got.clip_high_BT.item()) == (side == "low", side == "high")


@pytest.mark.parametrize(("ratio", "weight"), [(0.2, 0.4), (0.5, 0.5), (1.0, 1.0), (1.5, 1.5), (4.0, 1.5)])
def test_clamped_weight(ratio, weight):
    theta = torch.tensor([[-2.0]], dtype=torch.float64, requires_grad=True)
    log_ratio = theta - theta.detach() + math.log(ratio)
    got = clamped_weight(theta, log_ratio, torch.tensor([[3.0]]), floor=0.4, cap=1.5)
    got.token_loss_BT.sum().backward()
    assert got.token_loss_BT.item() == pytest.approx(6 * weight)
    assert theta.grad.item() == pytest.approx(-3 * weight)
    assert (got.clip_low_BT.item(), got.clip_high_BT.item()) == (ratio < 0.4, ratio > 1.5)


def test_a_weight_of_zero_needs_no_log_prob():
    theta = torch.tensor([[-math.inf, -math.inf]], dtype=torch.float64, requires_grad=True)
    loss = weighted_logp(theta, torch.tensor([[0.0, 0.5]]), torch.tensor([[3.0]]))
    loss.sum().backward()
    assert loss.tolist() == [[0.0, math.inf]]
    assert theta.grad.tolist() == [[0.0, -1.5]]


@pytest.mark.parametrize(("log_ratio", "value"), [(-1.0, math.exp(-1)), (0.5, math.exp(0.5)), (50.0, 3.0)])
def test_a_capped_value_keeps_its_slope(log_ratio, value):
    # d/dl of e^l is e^l itself; of a capped value, the cap.
    variable = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    got = value_capped(variable, 3.0)
    got.backward()
    assert got.item() == pytest.approx(value, rel=1e-14)
    assert variable.grad.item() == pytest.approx(value, rel=1e-14)


def test_gradient_carrier():
    theta = torch.tensor([-1.0, -math.inf], dtype=torch.float64, requires_grad=True)
    got = gradient_carrier(theta)
    got.sum().backward()
    assert got.tolist() == [0.0, 0.0]
    assert theta.grad.tolist() == [1.0, 0.0]


def test_policy_gradient():
    theta = torch.tensor([[-2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    got = policy_gradient(theta, torch.tensor([[3.0]]))
    got.token_loss_BT.sum().backward()
    assert got.token_loss_BT.tolist() == [[6.0, 1.5]]
    assert theta.grad.tolist() == [[-3.0, -3.0]]


def test_sequence_log_ratio():
    # (ln 2 + ln 8)/2 = ln 4; a row of one token keeps its ratio; a row of none has ratio 1.
    log_ratio = torch.tensor([[2.0, 8.0, 99.0], [3.0, 99.0, 99.0], [99.0, 99.0, 99.0]]).log()
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    got = sequence_log_ratio_B1(log_ratio, mask)
    torch.testing.assert_close(got.exp(), torch.tensor([[4.0], [3.0], [1.0]]))
