"""ROLL: variants, weights and filters."""

import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework

ROLL = framework("roll")
FILTERS = "train_infer_correction.filters"


def filtered(*filters, **options):
    return ROLL.recipe({FILTERS: [{"enabled": True, **one} for one in filters], **options})


def test_the_dual_clip_is_at_one_and_two_clips():
    assert ROLL.recipe({"dual_clip_loss": True}).loss["dual_clip"] == 1.4
    assert ROLL.recipe({}).loss["dual_clip"] is None


def test_the_range_replaces_the_clip():
    options = {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3}
    assert ROLL.recipe(options).loss.items() >= {"epsilon": 0.1, "epsilon_high": 0.3}.items()


def test_filters_are_rules_on_the_mismatch():
    made = filtered({"agg_type": "geometric", "ratio_enabled": True}, {"diff_enabled": True, "diff_high": 0.1})
    first, second = made.correction
    assert first.items() >= {"choice": "sequence_mask", "aggregate": "mean", "low": 0.8, "anchor": "old/mu"}.items()
    assert second.items() >= {"choice": "token_mask", "statistic": "difference", "low": -0.2, "high": 0.1}.items()
    assert made.reduction["denominator"] == "kept"
    assert ROLL.recipe({FILTERS: [{"ratio_enabled": True}]}).correction == ()


def test_filters_under_token_mean_are_said_to_act():
    assert "here they act" in filtered({"ratio_enabled": True}, loss_agg_mode="token-mean").notes[0]
    assert filtered({"ratio_enabled": True}).notes == ()


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"ratio_enabled": True, "diff_enabled": True}, "at most one token rule and one sequence rule"),
        ({"ratio_lo": 0.1}, "filters with enabled, agg_type"),
        ({"agg_type": "segment", "ratio_enabled": True}, "agg_type token, geometric or sequence"),
        ({"agg_type": "sequence", "diff_enabled": True}, "Differences of whole sequences are not shared"),
    ],
)
def test_refused_filters(given, part):
    with pytest.raises(OptionError) as error:
        filtered(given)
    assert part in str(error.value)


def test_weights_with_gradient_are_refused():
    with pytest.raises(OptionError, match="carry no gradient"):
        ROLL.recipe({"train_infer_correction.is_weight": {"enabled": True, "detach": False}})
