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


def test_a_capped_value_still_pulls(make_loss, hand_batch, grade):
    # A = −2, r = 2 with value cap 1.5: −r A = 3 and slope 3, where `delta` gives the value 3 and no slope. A = 1, r = 2
    # is clipped as before.
    batch = hand_batch()
    capped, cut = (grade(make_loss("grpo", **{field: 1.5}), batch) for field in ("value_cap", "delta"))
    assert capped.loss == pytest.approx(cut.loss, rel=1e-12)
    assert capped.grad_BT[1, 2] == pytest.approx(3 / 6, rel=1e-6)
    assert cut.grad_BT[1, 2] == 0
    assert torch.equal(capped.grad_BT[0], cut.grad_BT[0])
    with pytest.raises(OptionError, match=r"loss\.value_cap"):
        make_loss("grpo", value_cap=1)


MU = {"anchor": "theta/mu"}
TRL = "trl__GRPOTrainer_compute_loss__"


@pytest.mark.parametrize(
    ("file", "name", "options"),
    [
        (f"{TRL}grpo", "grpo", {}),
        (f"{TRL}bnpo", "bnpo", {}),
        (f"{TRL}dr_grpo", "dr_grpo", {}),
        (f"{TRL}dapo", "dapo", {"epsilon_high": 0.28}),
        (f"{TRL}dapo_delta4", "dapo", {"delta": 4}),
        ("verl__vanilla__token_mean", "dapo", {"dual_clip": 3, "clamp_nats": 20}),
        ("verl__vanilla__edge_seq_mean_token_mean", "grpo", {"dual_clip": 3, "clamp_nats": 20}),
        ("skyrl__ppo_policy_loss__dual_clip", "dapo", {"dual_clip": 3, "rtol": 5e-8}),
        ("slime__compute_policy_loss__ppo", "grpo", {}),
        ("slime__compute_policy_loss__ppo_dual3", "grpo", {"dual_clip": 3}),
        ("openrlhf__PolicyLoss__dual_clip3_sample_mean", "grpo", {"dual_clip": 3, "rtol": 5e-9}),
        ("roll__pg_ppo__ppo_dual", "grpo", {"dual_clip": 1.4, "rtol": 5e-9}),
        ("prime_rl_tip__PPOLoss__ppo_08_12_cap1e4", "dapo", MU | {"value_cap": 1e4}),
        ("prime_rl_tip__PPOLoss__ppo_08_12_cap3", "dapo", MU | {"value_cap": 3}),
        ("pipelinerl__rl_step__ppo_02", "grpo", MU | {"reduction": "sequence_sum"}),
    ],
)
def test_frameworks(file, name, options, agrees):
    agrees(file, name, **options)


def test_frameworks_with_a_behaviour_weight(agrees, behaviour_weight):
    agrees("nemo_rl__ClippedPGLossFn__dual_clip3_is", "dapo", dual_clip=3, weights=behaviour_weight())
    options = {"epsilon_high": 0.28, "dual_clip": 3, "weights": behaviour_weight(5, reject=True), "rtol": 5e-8}
    agrees("areal__ppo_actor_loss_fn__token_mask_5_dualclip3", "dapo", **options)
