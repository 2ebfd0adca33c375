"""Miles' losses are slime's, under their own name; its staleness rule is refused."""

import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework


def test_its_options_are_slimes():
    miles, slime = framework("miles"), framework("slime")
    assert miles.defaults() == slime.defaults()
    options = {"use_tis": True, "use_opsm": True, "eps_clip_c": 3.0}
    assert miles.recipe(options) == slime.recipe(options)


def test_its_staleness_rule_is_refused():
    with pytest.raises(OptionError, match=r"framework\.max_weight_staleness = 2 .* staleness is set by delay"):
        framework("miles").recipe({"max_weight_staleness": 2})
    framework("miles").recipe({"max_weight_staleness": None})
