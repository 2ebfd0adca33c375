"""VESPO: hand-computed values, a kernel that becomes the plain weight, and TRL's numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stalefront.choice import OptionError


def test_golden(make_loss, hand_batch, grade):
    # w = Π r = 4 and ½. Row 0, A = 1, k = 2, λ = 3: φ = e³ 16 e^−12 = 16 e^−9. Row 1, A = −2, k = 3, λ = 2:
    # φ = e² ⅛ e^−1 = e/8. −φ A log θ = φ [1, 2] and φ [−2, −6, −1]; gradient −φ A; over 5 tokens.
    loss = make_loss("vespo")
    graded = grade(loss, hand_batch(ratio=((2, 2), (0.5, 1, 1))))
    good, bad = 16 * math.exp(-9), math.e / 8
    assert graded.loss == pytest.approx((3 * good - 9 * bad) / 5, rel=1e-6)
    expected = torch.tensor([[-good, -good, 0], [2 * bad] * 3], dtype=torch.float64) / 5
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


def test_the_kernel_becomes_the_weight_itself(make_loss, random_inputs, grade):
    # k = 1 and λ → 0: φ = w; with one token a sequence, CISPO without cap.
    inputs, tiny = random_inputs(width=1), 1e-12
    kernel = {"k_pos": 1, "k_neg": 1, "lambda_pos": tiny, "lambda_neg": tiny}
    one, other = grade(make_loss("vespo", **kernel), inputs), grade(make_loss("cispo", epsilon_high=math.inf), inputs)
    assert one.loss == pytest.approx(other.loss, rel=1e-9)
    torch.testing.assert_close(one.grad_BT, other.grad_BT)


def test_bounds_on_the_weight(make_loss, random_inputs):
    inputs = random_inputs(rows=2, width=1)
    far = make_loss("vespo", anchor="theta/mu", clamp_nats=None)
    low = far.kernel(type(inputs)(**inputs.tensors() | {"logp_theta_BT": inputs.logp_theta_BT - 500}))
    good = math.exp(3 + 2 * math.log(1e-8) - 3e-8)
    bad = math.exp(2 + 3 * math.log(1e-8) - 2e-8)
    assert low[:, 0].tolist() == pytest.approx([good, bad], rel=1e-9)


def test_trl(agrees):
    agrees("trl__GRPOTrainer_compute_loss__vespo", "vespo")


@pytest.mark.parametrize(("field", "value"), [("k_pos", 0), ("lambda_neg", -1), ("weight_floor", 2)])
def test_refused(make_loss, field, value):
    with pytest.raises(OptionError, match=f"loss.{field}"):
        make_loss("vespo", **{field: value})


@pytest.mark.parametrize(("how", "product"), [("truncate", 1.5 * 0.5), ("mask", 1e-8 * 0.5)])
def test_mismatch_enters_the_weight_by_hand(make_loss, hand_batch, how, product):
    """θ/old = [2, ½], so their product is 1; old/μ = [4, ½]: 4 is held at 1.5, or put to the smallest weight."""
    inputs = hand_batch(advantage=(1, 0))
    mu = inputs.logp_old_BT.clone()
    mu[0, :2] -= torch.tensor([4.0, 0.5], dtype=torch.float64).log()
    inputs = replace(inputs, logp_behav_BT=mu)
    phi = make_loss("vespo", mismatch=how, mismatch_high=1.5).kernel(inputs)[0, 0].item()
    w = max(product, 1e-8)
    assert phi == pytest.approx(math.exp(3) * w**2 * math.exp(-3 * w), rel=1e-12)


def test_untouched_mismatch_is_the_anchor(make_loss, random_inputs):
    inputs = random_inputs()
    both = make_loss("vespo", mismatch="truncate").kernel(inputs)
    torch.testing.assert_close(both, make_loss("vespo", anchor="theta/mu").kernel(inputs))


def test_mismatch_is_not_counted_twice(make_loss):
    with pytest.raises(OptionError, match=r"loss\.mismatch = 'mask' .* none with anchor=theta/mu"):
        make_loss("vespo", anchor="theta/mu", mismatch="mask")
