"""Sequence mask: every aggregate and kept weight by hand, identities, and the masks of seven frameworks."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.correction import chain

BAND = {"low": 0.9, "high": 1.7}


def test_aggregates_by_hand(rule, sampled, weigh):
    # Geometric mean 2, product 4, largest 4 | mean 1.2, product 1.44, largest 1.44 | all 1.
    inputs = sampled([[1.0, 4.0], [1.0, 1.44], [None, None]])
    for aggregate, high, kept in (("mean", 1.3, 2), ("sum", 1.3, 1), ("max", 1.3, 1), ("sum", 4.0, 3)):
        band = rule("sequence_mask", aggregate=aggregate, low=0.5, high=high)
        # Bounds are inclusive, so the product 4 stays below a bound of 4 up to the rounding of exp(log 4).
        keep = weigh(inputs, rule("sequence_mask", aggregate=aggregate, low=0.5, high=high * (1 + 1e-12)))[1]
        assert [all(row) for row in keep] == [kept > 2, kept > 1, True]
        assert weigh(inputs, band)[0] == [[1.0] * 2] * 3


@pytest.mark.parametrize(
    ("weight", "expected"),
    [("one", [1.0, 1.0]), ("geometric", [1.2, 1.2]), ("product", [1.44, 1.44]), ("token", [0.9, 1.6])],
)
def test_weights_of_the_kept_by_hand(rule, sampled, weigh, weight, expected):
    inputs = sampled([[0.9, 1.6], [5.0, 9.0]])
    got, keep = weigh(inputs, rule("sequence_mask", **BAND, weight=weight))
    assert got[0] == pytest.approx(expected)
    assert keep == [[True] * 2, [False] * 2]
    if weight != "one":
        assert got[1] == [0.0, 0.0]
    zeroed, keep = weigh(inputs, rule("sequence_mask", **BAND, weight=weight, outside="zero"))
    assert zeroed == [pytest.approx(expected), [0.0, 0.0]]
    assert keep == [[True] * 2] * 2


def test_gradient_by_hand(rule, sampled, make_loss, grade):
    # Of two sequences one is kept, with weight 1.2: gradient −1.2 A / (2 · 2) on its tokens.
    inputs = sampled([[0.9, 1.6], [5.0, 9.0]])
    weights = chain([rule("sequence_mask", **BAND, weight="geometric")], inputs)
    graded = grade(make_loss("reinforce"), inputs, weights=weights)
    expected = torch.tensor([[-0.3, -0.3], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


def test_of_one_token_it_is_the_token_mask(rule, random_inputs):
    inputs = random_inputs(width=1, spread=2.0)
    one = chain([rule("sequence_mask", low=0.5, high=2.0)], inputs)
    other = chain([rule("token_mask", low=0.5, high=2.0)], inputs)
    assert torch.equal(one.keep_BT, other.keep_BT)


def test_a_sequence_without_survivors_passes(rule, sampled, weigh):
    inputs = sampled([[50.0, 60.0], [1.0, 50.0]])
    token = rule("token_mask", high=10.0)
    assert weigh(inputs, token, rule("sequence_mask", over="kept"))[1] == [[False, False], [True, False]]
    survivors = chain([token, rule("sequence_mask", over="kept")], inputs)
    # The first rule took its tokens; the second found nothing to reject.
    assert survivors.removed_by_BT.tolist() == [[1, 1], [0, 1]]
    assert weigh(inputs, token, rule("sequence_mask", over="valid"))[1] == [[False] * 2, [False] * 2]


def test_areal_and_the_maximum(rule, agrees):
    make = lambda **fields: [rule("sequence_mask", anchor="old/mu", **fields)]  # noqa: E731
    areal = {"weight": "behave_imp_weight", "keep": "behave_mask", "dtype": torch.float32, "everywhere": True}
    geometric = {"weight": "geometric"}
    agrees("areal__ppo_actor_loss_fn__seq_mask_ratio_mean_09_17", make(**BAND, **geometric), **areal)
    product = make(aggregate="sum", low=0.5, high=2.0, **geometric)
    agrees("areal__ppo_actor_loss_fn__seq_mask_ratio_sum_05_2", product, **areal)
    largest = make(aggregate="max", low=None, high=100.0, **geometric)
    agrees("areal__ppo_actor_loss_fn__seq_mask_ratio_max_5", largest, **areal)
    k2 = make(statistic="k2", low=None, high=0.5, weight="token")
    agrees("areal__ppo_actor_loss_fn__seq_mask_kl_k2_mean_05", k2, **areal)


def test_verl(rule, agrees):
    make = lambda **fields: rule("sequence_mask", anchor="old/mu", **fields)  # noqa: E731
    name, keep = "verl__rollout_correction__{}", "modified_response_mask"
    inverse = {"statistic": "inverse_ratio"}
    for band, low, high in (("0999_1001", 0.999, 1.001), ("099_101", 0.99, 1.01)):
        agrees(name.format(f"rs_seq_mean_k1_{band}"), [make(**inverse, low=low, high=high)], keep=keep)
    summed = make(**inverse, aggregate="sum", low=0.5, high=2.0)
    agrees(name.format("rs_seq_sum_k1_05_2"), [summed], keep=keep)
    agrees(name.format("rs_seq_mean_k3_001"), [make(statistic="k3", low=None, high=0.01)], keep=keep)
    largest = make(statistic="k2", aggregate="max", low=None, high=10.0)
    tokens = rule("token_mask", anchor="old/mu", statistic="k3", low=None, high=0.5)
    agrees(name.format("rs_seq_max_k2_and_token_k3"), [largest, tokens], keep=keep)
    tis = rule("token_tis", anchor="old/mu", clamp_nats=20.0)
    both = [tis, make(**inverse, **BAND)]
    agrees(name.format("is_token2_rs_seq_mean_k1"), both, weight="rollout_is_weights", keep=keep)


def test_trl_zeroes_products_above_the_bound_alone(rule, agrees):
    make = rule("sequence_mask", anchor="old/mu", aggregate="sum", weight="product", low=None, high=3.0)
    name = "trl__GRPOTrainer_compute_loss__is_sequence_mask_c3_default"
    agrees(name, [make], weight="importance_sampling_ratio", everywhere=True)


def test_skyrl_in_its_order(rule, agrees):
    make = lambda stem, **fields: rule(stem, anchor="old/mu", **fields)  # noqa: E731
    skyrl = {"keep": "loss_mask_after", "dtype": torch.float32}
    name = "skyrl__ppo_policy_loss__{}"
    mask = lambda **fields: make("sequence_mask", over="kept", **fields)  # noqa: E731
    agrees(name.format("regular_geo_mask"), [mask()], **skyrl)
    agrees(name.format("regular_geo_mask_wide"), [mask(**BAND)], **skyrl)
    product = mask(aggregate="sum", low=0.5, high=2.0)
    agrees(name.format("regular_product_mask"), [product], **skyrl)
    # Outliers, then tokens, then TIS, then the mean over what has survived.
    order = [make("outlier_veto"), make("token_mask", high=5.0), make("token_tis"), mask(low=0.8, high=1.4)]
    agrees(name.format("regular_all_order"), order, weight="tis_ratio", **skyrl)
    order = [make("outlier_veto"), make("sequence_tis", cap=5.0, over="kept"), product]
    agrees(name.format("edge_all_order"), order, weight="tis_ratio", **skyrl)


@pytest.mark.parametrize(
    ("fields", "unbounded"),
    [
        ({}, False),
        ({"weight": "token"}, False),
        ({"weight": "token", "high": None}, True),
        ({"weight": "token", "high": None, "clamp_nats": 20.0}, False),
        ({"weight": "product", "statistic": "inverse_ratio", "low": None}, True),
        ({"weight": "product", "statistic": "inverse_ratio"}, False),
        ({"weight": "token", "statistic": "difference", "low": -0.5}, True),
    ],
)
def test_where_a_weight_may_be_infinite(rule, fields, unbounded):
    assert rule("sequence_mask", **fields).unbounded is unbounded


def test_refused(rule, make_cell):
    with pytest.raises(OptionError, match=r"sequence_mask\.low"):
        rule("sequence_mask", low=1.001)
    with pytest.raises(OptionError, match=r"sequence_mask\.high"):
        rule("sequence_mask", low=None, high=math.nan)
    options = {"loss": "reinforce", "correction": ["token_tis", "sequence_mask"]}
    with pytest.raises(OptionError, match="token_tis holds theta/mu; keep one of the two"):
        make_cell(**options, **{"correction.sequence_mask.weight": "token"})
    assert len(make_cell(**options).correction) == 2
