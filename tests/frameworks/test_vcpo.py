"""VCPO: a weight and a controller."""

import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework

VCPO = framework("vcpo")


def test_its_defaults_are_its_released_recipe():
    made = VCPO.recipe({})
    assert made.loss["choice"] == "reinforce"
    assert made.correction[0].items() >= {"choice": "sequence_tis", "anchor": "theta/mu", "cap": 8.0}.items()
    assert made.controller == ({"choice": "vcpo", "base": 1.0, "power": 0.5, "clip": None},)


def test_scaling_of_clipped_weights_is_clipped_where_they_are():
    options = {"ess_scaling": {"use_clipped": True, "scaling_rule": "linear"}, "rollout_is_threshold": 4.0}
    assert VCPO.recipe(options).controller[0].items() >= {"clip": 4.0, "power": 1.0}.items()
    assert VCPO.recipe({"ess_scaling.enable": False}).controller == ()


def test_the_baseline_is_a_function_and_no_part_of_the_loop():
    with pytest.raises(OptionError, match="a backward pass each"):
        VCPO.recipe({"grad_baselining.enable": True})
