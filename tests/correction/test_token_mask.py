"""Token mask: every statistic on its bounds by hand, identities, and the masks of five frameworks."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.correction import chain
from stalefront.ratios import token_statistic


def test_a_band_by_hand(rule, sampled, weigh):
    inputs = sampled([[0.5, 2.0, 1.0, 4.0, None]])
    weight, keep = weigh(inputs, rule("token_mask"))
    assert weight == [[1.0] * 5]
    assert keep == [[True, True, True, False, True]]
    assert weigh(inputs, rule("token_mask", inclusive=False))[1] == [[False, False, True, False, True]]
    assert weigh(inputs, rule("token_mask", low=None))[1] == [[True, True, True, False, True]]
    assert weigh(inputs, rule("token_mask", high=None))[1] == [[True] * 5]


def test_gradient_by_hand(rule, sampled, make_loss, grade):
    # The second token is gone and still counts as one of two: gradient −A / 2 on the first alone.
    inputs = sampled([[1.5, 3.0]])
    graded = grade(make_loss("reinforce"), inputs, weights=chain([rule("token_mask")], inputs))
    torch.testing.assert_close(graded.grad_BT, torch.tensor([[-0.5, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("ratio", math.log(2)),
        ("inverse_ratio", -math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 1 - math.log(2)),
        ("inverse_k3", math.log(2) - 0.5),
    ],
)
def test_statistics_of_a_ratio_of_two(kind, value):
    got = token_statistic(torch.tensor([2.0], dtype=torch.float64).log(), kind)
    assert got.item() == pytest.approx(value, rel=1e-12)


def test_an_inverse_band_is_the_band_of_the_inverse(rule, random_inputs):
    inputs = random_inputs(spread=2.0)
    one = chain([rule("token_mask", low=0.4, high=1.6)], inputs).keep_BT
    other = chain([rule("token_mask", statistic="inverse_ratio", low=1 / 1.6, high=1 / 0.4)], inputs).keep_BT
    assert torch.equal(one, other)


def test_a_difference_of_probabilities(rule, sampled, weigh):
    # θ has e^−1 = .368 everywhere; μ has .184 and .736: differences +.184 and −.368.
    inputs = sampled([[2.0, 0.5]])
    band = {"statistic": "difference", "low": -0.3, "high": 0.3}
    assert weigh(inputs, rule("token_mask", **band))[1] == [[True, False]]
    assert weigh(inputs, rule("token_mask", **band | {"high": 0.1}))[1] == [[False, False]]


def test_peers(rule, agrees):
    make = lambda **fields: rule("token_mask", anchor="old/mu", **fields)  # noqa: E731
    tis, raw = rule("token_tis", anchor="old/mu"), rule("token_tis", anchor="old/mu", cap=math.inf)
    verl = "verl__rollout_correction__rs_token_k1_{}"
    for name, high in (("05_2", 2.0), ("05_5", 5.0)):
        bounds = make(statistic="inverse_ratio", low=0.5, high=high)
        agrees(verl.format(name), [bounds], keep="modified_response_mask")
    fork = "verl_fork_vcpo__rollout_correction__token_is2_token_rs"
    agrees(fork, [tis, make(high=5.0)], weight="rollout_is_weights", keep="modified_response_mask")
    skyrl = "skyrl__ppo_policy_loss__regular_token_mask_icepop"
    agrees(skyrl, [make(high=5.0)], keep="loss_mask_after", dtype=torch.float32)
    areal, k3 = "areal__ppo_actor_loss_fn__token_mask_kl_k3_05", make(statistic="inverse_k3", low=None, high=0.5)
    agrees(areal, [raw, k3], weight="behave_imp_weight", keep="behave_mask", dtype=torch.float32, everywhere=True)
    roll = "roll__compute_train_infer_correction__{}"
    agrees(roll.format("token_filter_08_12"), [make(low=0.8, high=1.2)], keep="filter_mask")
    geometric = rule("sequence_mask", anchor="old/mu", low=0.9, high=1.7)
    difference = make(statistic="difference", low=-0.2, high=0.2)
    agrees(roll.format("seq_filters_geo_and_diff"), [geometric, difference], keep="filter_mask")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("low", {"low": 1.5}),
        ("high", {"high": 0.9}),
        ("high", {"low": None, "high": None}),
        ("high", {"low": 0.0, "high": math.inf}),
        ("low", {"low": 1.0, "inclusive": False}),
        ("low", {"statistic": "k2", "low": 0.5}),
        ("high", {"low": None, "high": math.nan}),
        ("high", {"statistic": "difference", "low": None, "high": 1.0}),
        ("clamp_nats", {"clamp_nats": 0}),
    ],
)
def test_refused(rule, field, fields):
    with pytest.raises(OptionError) as caught:
        rule("token_mask", **fields)
    assert caught.value.field == f"correction.token_mask.{field}"


def test_a_mask_may_stand_on_a_loss_with_a_ratio(make_cell):
    assert make_cell(loss="grpo", correction=["token_mask"]).correction[0].high == 2.0


def test_refused_where_it_would_never_act(make_cell):
    options = {"correction": ["token_mask"], "correction.token_mask.anchor": "theta/old"}
    with pytest.raises(OptionError, match="every step is on-policy"):
        make_cell(loss="grpo", delay="none", **options)
    assert make_cell(loss="grpo", delay="lag", **options).correction
