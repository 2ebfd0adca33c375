"""Outlier veto: one token takes its sequence, by hand; identities; the vetoes of SkyRL, verl's fork and slime."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.correction import chain

ROWS = [[1.0, 101.0], [1.0, 99.0], [2e-4, 1.0], [5e-5, None]]


def test_one_token_takes_its_sequence_by_hand(rule, sampled, weigh):
    inputs = sampled(ROWS)
    weight, keep = weigh(inputs, rule("outlier_veto"))
    assert weight == [[1.0] * 2] * 4
    assert [row[0] and row[1] for row in keep] == [False, True, True, False]
    assert [row[0] for row in weigh(inputs, rule("outlier_veto", high=None))[1]] == [True, True, True, False]
    assert [row[0] for row in weigh(inputs, rule("outlier_veto", low=None))[1]] == [False, True, True, True]


def test_a_ratio_on_a_bound_is_no_outlier(rule, sampled, weigh):
    assert weigh(sampled([[0.5, 2.0]]), rule("outlier_veto", low=0.5, high=2.0))[1] == [[True, True]]


def test_gradient_by_hand(rule, sampled, make_loss, grade):
    inputs = sampled(ROWS[:2])
    graded = grade(make_loss("reinforce"), inputs, weights=chain([rule("outlier_veto")], inputs))
    expected = torch.tensor([[0.0, 0.0], [-0.25, -0.25]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected)


def test_it_is_the_sequence_mask_of_the_maximum(rule, random_inputs):
    inputs = random_inputs(spread=3.0, rows=20)
    one = chain([rule("outlier_veto", low=None, high=4.0)], inputs).keep_BT
    other = chain([rule("sequence_mask", aggregate="max", low=None, high=4.0)], inputs).keep_BT
    assert torch.equal(one, other)


def test_a_ratio_that_is_no_number_vetoes(rule, sampled):
    inputs = sampled([[1.0, 1.0], [1.0, 1.0]])
    theta = inputs.logp_theta_BT.clone()
    theta[0, 1] = math.nan
    keep = chain([rule("outlier_veto")], replace(inputs, logp_theta_BT=theta)).keep_BT
    assert keep.tolist() == [[False, False], [True, True]]


def test_peers(rule, agrees):
    make = lambda **fields: rule("outlier_veto", anchor="old/mu", **fields)  # noqa: E731
    agrees(
        "skyrl__ppo_policy_loss__regular_outlier_mask", [make(clamp_nats=20.0)], keep="loss_mask_after",
        dtype=torch.float32,
    )  # fmt: skip
    low = make(high=None)
    fork, keep = "verl_fork_vcpo__rollout_correction__{}", "modified_response_mask"
    agrees(fork.format("veto_1e-4"), [low], keep=keep)
    product = rule("sequence_tis", anchor="old/mu", cap=8.0)
    mean = rule("sequence_mask", anchor="old/mu", low=0.9, high=1.7)
    agrees(fork.format("seq_is2_geo_rs_veto"), [product, mean, low], weight="rollout_is_weights", keep=keep)
    tis = rule("token_tis", anchor="old/mu")
    slime = "slime__mis_compute_mis_weights__geo_rs"
    agrees(slime, [tis, mean, low], weight="weights", keep="modified_masks")


@pytest.mark.parametrize(("field", "value"), [("low", 1.5), ("high", 0.5)])
def test_refused(rule, field, value):
    with pytest.raises(OptionError, match=rf"outlier_veto\.{field}"):
        rule("outlier_veto", **{field: value})
