"""IcePop: kept ratios by hand, its identities, and the numbers of six frameworks."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.correction import chain


def test_weights_by_hand(rule, sampled, weigh):
    inputs = sampled([[0.4, 0.5, 3.0, 6.0, None]])
    weight, keep = weigh(inputs, rule("icepop"))
    assert weight[0] == pytest.approx([0.0, 0.5, 3.0, 0.0, 1.0])
    assert keep == [[False, True, True, False, True]]
    weight, keep = weigh(inputs, rule("icepop", outside="zero"))
    assert weight[0] == pytest.approx([0.0, 0.5, 3.0, 0.0, 1.0])
    assert keep == [[True] * 5]


def test_strict_bounds(rule, sampled, weigh):
    inputs = sampled([[0.5, 1.0, 2.0]])
    assert weigh(inputs, rule("icepop", high=2.0, inclusive=False))[0][0] == pytest.approx([0.0, 1.0, 0.0])


def test_gradient_by_hand(rule, sampled, make_loss, grade):
    # Weights 3 and 0 of two tokens: gradient −w A / 2.
    inputs = sampled([[3.0, 6.0]])
    graded = grade(make_loss("reinforce"), inputs, weights=chain([rule("icepop")], inputs))
    torch.testing.assert_close(graded.grad_BT, torch.tensor([[-1.5, 0.0]], dtype=torch.float64))


def test_it_is_the_token_mask_times_the_ratio(rule, random_inputs):
    inputs = random_inputs(spread=2.0)
    one = chain([rule("icepop", low=0.5, high=2.0)], inputs)
    other = chain([rule("token_tis", cap=math.inf), rule("token_mask", low=0.5, high=2.0)], inputs)
    assert torch.equal(one.keep_BT, other.keep_BT)
    assert torch.equal(one.weight_BT, other.weight_BT * other.keep_BT)


def test_an_open_band_may_be_infinite_and_says_so(rule):
    assert not rule("icepop").unbounded
    assert rule("icepop", high=None).unbounded
    assert not rule("icepop", high=None, clamp_nats=20.0).unbounded


def test_peers(rule, agrees):
    make = lambda **fields: [rule("icepop", anchor="old/mu", **fields)]  # noqa: E731
    kept = {"weight": "rollout_is_weights", "keep": "modified_response_mask"}
    agrees("verl__rollout_correction__is_token_icepop_05_5", make(outside="zero"), **kept, everywhere=True)
    areal = {"weight": "behave_imp_weight", "keep": "behave_mask", "dtype": torch.float32, "everywhere": True}
    for name, low in (("token_mask_ratio_05_5", 0.5), ("token_mask_ratio_5", None), ("edge_token_mask_5", 0.5)):
        agrees(f"areal__ppo_actor_loss_fn__{name}", make(low=low), **areal)
    ratio = "importance_sampling_ratio"
    agrees("trl__GRPOTrainer_compute_loss__is_token_mask_05_5", make(), weight=ratio, everywhere=True)
    name = "open_instruct__rho_correction_grpo_loss__dapo_icepop_05_5"
    agrees(name, make(clamp_nats=10.0), weight="rho_weights", everywhere=True)
    slime = "slime__mis_compute_mis_weights__tis_mask_mode"
    agrees(slime, make(high=2.0), weight="weights", keep="modified_masks")
