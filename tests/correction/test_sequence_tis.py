"""Sequence TIS: the capped product by hand, its identities, and the products of four frameworks."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.correction import chain


def test_the_product_by_hand(rule, sampled, weigh):
    inputs = sampled([[2.0, 0.5, 1.5], [3.0, 2.0, None], [0.25, 0.5, None]])
    weight, keep = weigh(inputs, rule("sequence_tis"))
    for got, expected in zip(weight, (1.5, 2.0, 0.125), strict=True):
        assert got == pytest.approx([expected] * 3)
    assert all(all(row) for row in keep)
    assert weigh(inputs, rule("sequence_tis", floor=0.5))[0][2] == pytest.approx([0.5] * 3)


def test_gradient_by_hand(rule, sampled, make_loss, grade):
    # w = min(2 · 3, 4) on both tokens; −w A log θ: gradient −w A / 2.
    inputs = sampled([[2.0, 3.0]])
    graded = grade(make_loss("reinforce"), inputs, weights=chain([rule("sequence_tis", cap=4.0)], inputs))
    torch.testing.assert_close(graded.grad_BT, torch.full((1, 2), -2.0, dtype=torch.float64))


def test_of_one_token_it_is_token_tis(rule, random_inputs):
    inputs = random_inputs(width=1)
    one, other = (chain([rule(stem, cap=1.5)], inputs) for stem in ("sequence_tis", "token_tis"))
    assert torch.equal(one.weight_BT, other.weight_BT)


def test_over_kept_leaves_out_what_rules_before_rejected(rule, sampled, weigh):
    inputs = sampled([[1.5, 100.0], [100.0, 200.0]])
    mask = rule("token_mask", low=None, high=10.0)
    assert weigh(inputs, mask, rule("sequence_tis", over="kept"))[0] == [pytest.approx([1.5] * 2), [1.0] * 2]
    assert weigh(inputs, mask, rule("sequence_tis", over="valid"))[0] == [[2.0] * 2, [2.0] * 2]


@pytest.mark.parametrize(("shift", "weight"), [(100.0, 2.0), (-100.0, 0.0), (math.inf, 2.0), (-math.inf, 0.0)])
def test_products_that_leave_float32_are_at_the_bounds(rule, shift, weight, random_inputs):
    inputs = random_inputs(rows=1, width=5, dtype=torch.float32)
    moved = type(inputs)(
        inputs.logp_theta_BT, inputs.logp_theta_BT - shift, inputs.logp_theta_BT - shift, None,
        inputs.advantage_B, torch.ones(1, 5, dtype=torch.bool),
    )  # fmt: skip
    assert chain([rule("sequence_tis")], moved).weight_BT.tolist() == [[weight] * 5]


def test_peers(rule, agrees):
    make = lambda **fields: [rule("sequence_tis", anchor="old/mu", **fields)]  # noqa: E731
    # verl clamps the sum to ±20 before exp: below a finite cap that is a floor.
    clamped = make(floor=math.exp(-20))
    agrees("verl__rollout_correction__is_seq_tis2", clamped, weight="rollout_is_weights", keep="modified_response_mask")
    agrees("slime__mis_compute_mis_weights__tis_clip_seq", make(floor=0.5), weight="weights", keep="modified_masks")
    agrees("roll__compute_train_infer_correction__sequence_is_ub5", make(cap=5.0), weight="is_weight")
    agrees("trl__GRPOTrainer_compute_loss__is_sequence_truncate_c3", make(cap=3.0), weight="importance_sampling_ratio")
    skyrl = "skyrl__ppo_policy_loss__regular_seq_tis5"
    agrees(skyrl, make(cap=5.0, over="kept"), weight="tis_ratio", keep="loss_mask_after", dtype=torch.float32)
