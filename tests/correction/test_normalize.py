"""Normalisation: means by hand, its identities, and the batch-normalised weights of verl and slime."""

from __future__ import annotations

import pytest

from stalefront.choice import OptionError
from stalefront.correction import chain


def test_means_by_hand(rule, sampled, weigh):
    # Weights 1, 1.5 and ½, of two sequences: mean 1 over tokens; over sequences (1.25 + .5) / 2 = .875.
    inputs = sampled([[1.0, 1.5], [0.5, None]])
    tis = rule("token_tis")
    tokens, _ = weigh(inputs, tis, rule("normalize"))
    assert tokens == [pytest.approx([1.0, 1.5]), pytest.approx([0.5, 1.0])]
    sequences, _ = weigh(inputs, tis, rule("normalize", over="sequences"))
    assert sequences == [pytest.approx([1 / 0.875, 1.5 / 0.875]), pytest.approx([0.5 / 0.875, 1.0])]


def test_rejected_tokens_count_with_their_weight(rule, sampled, weigh):
    # IcePop leaves weights 2 and 0: the mean over both is 1, so nothing changes.
    weight, keep = weigh(sampled([[2.0, 100.0]]), rule("icepop"), rule("normalize"))
    assert weight == [pytest.approx([2.0, 0.0])]
    assert keep == [[True, False]]


@pytest.mark.parametrize("over", ["tokens", "sequences"])
def test_the_mean_becomes_one_whatever_the_scale(rule, over, random_inputs):
    inputs = random_inputs()
    weights = chain([rule("token_tis"), rule("normalize", over=over)], inputs)
    weight = weights.weight_BT.where(inputs.mask_BT, 0.0)
    per_row = weight.sum(-1) / inputs.mask_BT.sum(-1)
    mean = weight[inputs.mask_BT].mean() if over == "tokens" else per_row.mean()
    assert mean.item() == pytest.approx(1.0, rel=1e-12)


def test_a_sequence_without_a_token(rule, sampled, weigh):
    inputs = sampled([[1.5, 0.5], [None, None]])
    for empty, mean in (("skip", 1.0), ("count", 0.5)):
        weight, _ = weigh(inputs, rule("token_tis"), rule("normalize", over="sequences", empty=empty))
        assert weight[0] == pytest.approx([1.5 / mean, 0.5 / mean])


def test_weights_that_are_all_zero_stay(rule, sampled, weigh):
    weight, _ = weigh(sampled([[100.0, 200.0]]), rule("icepop"), rule("normalize"))
    assert weight == [[0.0, 0.0]]


def test_peers(rule, agrees):
    tis, sequences = rule("token_tis", anchor="old/mu"), rule("sequence_tis", anchor="old/mu")
    verl, key = "verl__rollout_correction__is_{}_tis2_batchnorm", "rollout_is_weights"
    agrees(verl.format("token"), [tis, rule("normalize")], weight=key)
    agrees(verl.format("seq"), [sequences, rule("normalize", over="sequences")], weight=key)
    # slime's rejection bounds fall back to those of its truncation; both act after the normalisation.
    bounds = rule("token_mask", anchor="old/mu", low=0.5, high=2.0)
    veto = rule("outlier_veto", anchor="old/mu", high=None)
    rules = [tis, rule("normalize"), bounds, veto]
    agrees("slime__mis_compute_mis_weights__yaml_default", rules, weight="weights", keep="modified_masks")


def test_refused_where_nothing_has_a_weight(make_cell):
    with pytest.raises(OptionError, match="All weights are 1"):
        make_cell(loss="reinforce", correction=["normalize"])
    with pytest.raises(OptionError, match="All weights are 1"):
        make_cell(loss="reinforce", correction=["token_mask", "normalize", "token_tis"])
    assert make_cell(loss="reinforce", correction=["token_tis", "normalize"]).correction[1].over == "tokens"


@pytest.mark.parametrize("field", ["optimizer.grad_accum", "model.ranks"])
def test_refused_where_a_step_is_split(field, make_cell):
    with pytest.raises(OptionError, match="must not be split") as caught:
        make_cell(loss="reinforce", correction=["token_tis", "normalize"], **{field: 2})
    assert caught.value.field == field
