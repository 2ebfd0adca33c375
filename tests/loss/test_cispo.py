"""CISPO: hand-computed values, and a capped token that still pulls."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError


def test_golden(make_loss, hand_batch, grade):
    # w = min(r, 1.5) = [1.5, .5], [.5, 1, 1.5]; −w A log θ = [1.5, 1], [−1, −6, −1.5]; sum −6 over 5 tokens.
    # Gradient −w A / 5: [−1.5, −.5] / 5 and [1, 2, 3] / 5. Capped: r = 2 in both rows.
    graded = grade(make_loss("cispo", epsilon_high=1.5), hand_batch())
    assert graded.loss == pytest.approx(-1.2, rel=1e-6)
    expected = torch.tensor([[-0.3, -0.1, 0], [0.2, 0.4, 0.6]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)
    assert graded.value.clip_high_BT.tolist() == [[True, False, False], [False, False, True]]
    assert not graded.value.clip_low_BT.any()


def test_without_cap_the_gradient_is_the_ratio_times_advantage(make_loss, random_inputs, grade):
    inputs = random_inputs()
    graded = grade(make_loss("cispo", epsilon_high=math.inf), inputs)
    weighted = inputs.log_ratio_BT.exp() * inputs.advantage_B[:, None] * inputs.mask_BT
    torch.testing.assert_close(graded.grad_BT, -weighted / inputs.mask_BT.sum(), rtol=1e-6, atol=1e-9)


def test_small_cap_scales_every_on_policy_gradient(make_loss, random_inputs, grade):
    inputs = random_inputs(spread=0)
    capped, free = (grade(make_loss("cispo", epsilon_high=cap), inputs) for cap in (0.2, 5))
    torch.testing.assert_close(capped.grad_BT, 0.2 * free.grad_BT)


@pytest.mark.parametrize("cap", [0, -1, math.nan])
def test_refused(make_loss, cap):
    with pytest.raises(OptionError, match="5 is canonical"):
        make_loss("cispo", epsilon_high=cap)


def test_floor_and_mask(make_loss, hand_batch, grade):
    # w = clamp(r, .75, 1.5) = [1.5, .75], [.75, 1, 1.5]. PPO would stop r = 2 with A > 0 and r = ½ with A < 0:
    # −w A log θ = [·, 1.5], [·, −6, −1.5]; gradient −w A; over 5 tokens.
    options = {"floor": 0.75, "epsilon_high": 1.5}
    graded = grade(make_loss("cispo", **options, ppo_mask=True), hand_batch())
    assert graded.loss == pytest.approx(-6 / 5, rel=1e-6)
    expected = torch.tensor([[0, -0.75, 0], [0, 2, 3]], dtype=torch.float64) / 5
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)
    unmasked = grade(make_loss("cispo", **options), hand_batch())
    assert unmasked.grad_BT[0, 0] == pytest.approx(-0.3)
    assert unmasked.grad_BT[1, 0] == pytest.approx(0.3)


def test_a_masked_cispo_is_ppo_with_the_clamped_weight(make_loss, random_inputs, grade):
    # Inside the band, and outside of it on the side that PPO leaves alone, both gradients point the same way.
    inputs = random_inputs(spread=2)
    one = grade(make_loss("cispo", floor=0.8, epsilon_high=1.2, ppo_mask=True), inputs)
    other = grade(make_loss("dapo", epsilon=0.2), inputs)
    assert torch.equal(one.grad_BT != 0, other.grad_BT != 0)


def bounds(low: float, high: float) -> dict[str, float]:
    return {"floor": low, "epsilon_high": high}


SEQUENCE = {"reduction": "sequence_mean"}


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("verl__cispo__eps02", bounds(0.8, 1.2)),
        ("verl__cispo__eps_10_40", bounds(0, 5)),
        ("trl__GRPOTrainer_compute_loss__cispo_default_epshigh02", bounds(0, 0.2)),
        ("trl__GRPOTrainer_compute_loss__cispo_epshigh5", bounds(0, 5)),
        ("prime_rl_tip__CISPOLoss__cispo_0_5", bounds(0, 5) | {"anchor": "theta/mu"}),
        ("stable_rl__compute_policy_loss_with_mask__pg_no_mask_c5", bounds(0, 5) | {"anchor": "theta/mu"}),
        ("skyrl__compute_policy_loss_cispo__anchor_old", bounds(0, 5) | {"rtol": 5e-8}),
        ("skyrl__compute_policy_loss_cispo__anchor_rollout", bounds(0, 5) | {"anchor": "theta/mu", "rtol": 5e-8}),
        ("slime__cispo__cispo_10_40", bounds(0, 5) | SEQUENCE),
        ("roll__pg_cispo__cispo_01", bounds(0.9, 1.1) | SEQUENCE | {"rtol": 5e-9}),
        ("roll__pg_cispo__cispo_unified_mask", bounds(0.8, 1.2) | SEQUENCE | {"ppo_mask": True, "rtol": 5e-9}),
    ],
)
def test_frameworks(file, options, agrees):
    agrees(file, "cispo", **options)


def test_frameworks_with_a_behaviour_weight(agrees, behaviour_weight):
    file = "open_instruct__rho_correction_grpo_loss__cispo_clamp2"
    agrees(file, "cispo", epsilon_high=1.272, weights=behaviour_weight(2))
    agrees("nemo_rl__ClippedPGLossFn__cispo_10_40_is", "cispo", weights=behaviour_weight(2))
    # The value is a small difference of large ratios in single precision.
    reject = behaviour_weight(5, reject=True)
    agrees("areal__cispo_loss_fn__eps_10_40_rs5", "cispo", weights=reject, rtol=2e-7)


@pytest.mark.parametrize("floor", [-0.1, 6.0])
def test_floor_refused(make_loss, floor):
    with pytest.raises(OptionError, match=r"loss\.floor"):
        make_loss("cispo", floor=floor)
