"""GRPO: hand-computed values, and the clip's edges."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError


def test_golden(make_loss, hand_batch, grade):
    # A = 1:  r = 2  → −min(2, 1.2)     = −1.2, clipped high: no gradient
    #         r = ½  → −min(.5, .8)     = −.5,  gradient −rA = −.5
    # A = −2: r = ½  → −min(−1, −1.6)   = 1.6,  clipped low: no gradient
    #         r = 1  → −min(−2, −2)     = 2,    gradient 2
    #         r = 2  → −min(−4, −2.4)   = 4,    gradient 4
    # means: −1.7/2 = −.85 and 7.6/3; their mean (−.85 + 7.6/3)/2 = .8416667
    # gradients over 2·2 in the first row and 2·3 in the second
    graded = grade(make_loss("grpo", epsilon=0.2), hand_batch())
    assert graded.loss == pytest.approx((-0.85 + 7.6 / 3) / 2, rel=1e-6)
    expected = torch.tensor([[0, -0.125, 0], [0, 1 / 3, 2 / 3]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)
    assert graded.value.clip_high_BT.tolist() == [[True, False, False], [False, False, False]]
    assert graded.value.clip_low_BT.tolist() == [[False, False, False], [True, False, False]]


def test_golden_with_kl(make_loss, hand_batch, grade):
    # Off: beta · k3 with k3 = e^d − d − 1, d = log ref/θ: d = ln 2 → 1 − ln 2, gradient 1 − e^d = −1; d = 0 → 0.
    # On: beta · r · k3, gradient beta · r · (k3 + 1 − e^d).
    # Only the first token of the first row has d = ln 2; its r is 2 and its clipped surrogate has no gradient.
    batch = hand_batch(ref_ratio=((2, 1), (1, 1, 1)))
    plain = (-0.85 + 7.6 / 3) / 2
    off = grade(make_loss("grpo", beta=0.4, use_bias_correction_kl=False), batch)
    assert off.loss == pytest.approx(plain + 0.4 * (1 - math.log(2)) / 4, rel=1e-6)
    assert off.grad_BT[0, 0].item() == pytest.approx(-0.4 / 4, rel=1e-6)
    on = grade(make_loss("grpo", beta=0.4, use_bias_correction_kl=True), batch)
    assert on.loss == pytest.approx(plain + 0.8 * (1 - math.log(2)) / 4, rel=1e-6)
    assert on.grad_BT[0, 0].item() == pytest.approx(-0.8 * math.log(2) / 4, rel=1e-6)
    torch.testing.assert_close(on.grad_BT[1], torch.tensor([0, 1 / 3, 2 / 3], dtype=torch.float64), rtol=1e-6, atol=0)


def test_upper_width_of_its_own(make_loss, hand_batch, grade):
    # epsilon_high = 1.5 lets r = 2 through: −2, gradient −2 / 4.
    graded = grade(make_loss("grpo", epsilon=0.2, epsilon_high=1.5), hand_batch())
    assert graded.grad_BT[0, 0].item() == pytest.approx(-0.5, rel=1e-6)
    assert not graded.value.clip_high_BT.any()


def test_delta_caps_the_unclipped_ratio(make_loss, hand_batch, grade):
    # A = −2, r = 2, delta = 1.5: −min(−3, −2.4) = 3, and no gradient through the cap.
    graded = grade(make_loss("grpo", epsilon=0.2, delta=1.5), hand_batch())
    assert graded.loss == pytest.approx((-0.85 + 6.6 / 3) / 2, rel=1e-6)
    torch.testing.assert_close(graded.grad_BT[1], torch.tensor([0, 1 / 3, 0], dtype=torch.float64), rtol=1e-6, atol=0)


def test_infinite_width_is_ratio_times_advantage(make_loss, random_inputs, grade):
    inputs = random_inputs()
    graded = grade(make_loss("grpo", epsilon=math.inf), inputs)
    ratio = inputs.log_ratio_BT.exp() * inputs.mask_BT
    share = 1 / (inputs.mask_BT.sum(-1, keepdim=True) * len(ratio))
    expected = -ratio * inputs.advantage_B[:, None] * share
    assert graded.loss == pytest.approx(expected.sum().item(), rel=1e-6)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=1e-9)
    assert not (graded.value.clip_low_BT | graded.value.clip_high_BT).any()


@pytest.mark.parametrize(
    ("field", "value"),
    [("epsilon", -0.1), ("epsilon", math.nan), ("epsilon_high", -1), ("delta", 1.1), ("beta", -1), ("beta", math.inf)],
)
def test_refused(make_loss, field, value):
    with pytest.raises(OptionError, match=f"loss.{field}"):
        make_loss("grpo", **{field: value})
