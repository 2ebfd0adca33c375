"""The verl fork of VCPO: bounds on old/μ, and the veto."""

import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework

FORK = framework("verl_fork_vcpo")


def test_bounds_are_on_the_ratio_itself():
    (rule,) = FORK.recipe({"rollout_rs": "geometric", "rollout_rs_threshold": 1.25}).correction
    assert (rule["statistic"], rule["aggregate"], rule["low"], rule["high"]) == ("ratio", "mean", 0.8, 1.25)


def test_rejection_takes_the_bound_of_weights_where_it_has_none():
    (rule,) = FORK.recipe({"rollout_rs": "sequence"}).correction
    assert (rule["low"], rule["high"], rule["aggregate"]) == (0.5, 2.0, "sum")


def test_order_and_denominators():
    options = {"rollout_is": "geometric", "rollout_rs": "token", "rollout_token_veto_threshold": 1e-4}
    made = FORK.recipe(options)
    assert [rule["choice"] for rule in made.correction] == ["geometric_tis", "token_mask", "outlier_veto"]
    assert made.reduction["denominator"] == "kept"
    assert FORK.recipe({"rollout_is": "token"}).reduction["denominator"] == "valid"


def test_a_bound_of_0_is_refused():
    with pytest.raises(OptionError, match=r"rollout_rs_threshold = 0\.0"):
        FORK.recipe({"rollout_rs": "token", "rollout_rs_threshold": 0})
