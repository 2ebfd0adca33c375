"""torchforge's loss has no ratio; its staleness rule is refused."""

import json

import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework
from stalefront.parity import GoldenFile, check


def test_its_loss_is_reinforce_with_a_kl_term():
    made = framework("torchforge").recipe({})
    assert (made.loss["choice"], made.loss["beta"], made.loss["use_bias_correction_kl"]) == ("reinforce", 0.1, False)
    assert (made.reduction["choice"], made.correction) == ("sequence_mean", ())


def test_its_table_comes_later(tmp_path):
    """Its file lists what survives, and no row a scenario."""
    path = tmp_path / "table.json"
    stored = {"peer": "torchforge", "function": "age_evict", "settings": {}}
    stored |= {"inputs": {"policy_versions": [1, 2], "policy_version": 3}, "outputs": {"kept_age1": [1]}}
    path.write_text(json.dumps(stored))
    assert check(GoldenFile.read(path)).state == "later"


def test_its_staleness_rule_is_refused():
    with pytest.raises(OptionError, match=r"framework\.max_policy_age = 3 .* staleness is set by delay"):
        framework("torchforge").recipe({"max_policy_age": 3})
