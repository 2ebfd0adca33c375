"""INT4: integers by hand, groups that share a scale, and at most fifteen values a group."""

from __future__ import annotations

import pytest
import torch

from stalefront.choice import OptionError


def test_values_by_hand(entry):
    weight = torch.tensor([[7.0, 1.4, -2.6, 0.7]])
    assert entry("int4").weight(weight).tolist() == [[7.0, 1.0, -3.0, 1.0]]
    # With a scale of its own the second half is 2.6 / 7 apart.
    halves = entry("int4", group_size=2).weight(weight)
    torch.testing.assert_close(halves, torch.tensor([[7.0, 1.0, -2.6, 2 * 2.6 / 7]]))
    torch.testing.assert_close(entry("int4", strength=0.5).weight(weight), torch.tensor([[7.0, 1.2, -2.8, 0.85]]))
    assert entry("int4", strength=0.0).weight(weight) is weight


@pytest.mark.parametrize("group", [None, 8])
def test_every_group_holds_integers_from_minus_7_to_7(group, make_learner, moved):
    found = moved(make_learner("int4", **{"mismatch.int4.group_size": group}))
    assert len(found) == 14
    for live, mine in found.values():
        groups = [w.reshape(-1, group or w.shape[-1]).double() for w in (live, mine)]
        step = groups[0].abs().amax(-1, keepdim=True) / 7
        levels = groups[1] / step
        assert (levels - levels.round()).abs().max() < 1e-4
        assert levels.abs().max() < 7.0001
        assert ((groups[0] - groups[1]) / step).abs().max() <= 0.5001


def test_smaller_groups_are_nearer(make_learner, moved):
    errors = []
    for group in (None, 16, 4):
        found = moved(make_learner("int4", **{"mismatch.int4.group_size": group}))
        errors.append(sum(float((live - mine).square().sum()) for live, mine in found.values()))
    assert errors[0] > errors[1] > errors[2] > 0


def test_a_group_must_divide_the_width(make_learner, refused):
    refused("int4", "group_size", group_size=0)
    with pytest.raises(OptionError, match="a divisor of 32, the inputs of model") as caught:
        make_learner("int4", **{"mismatch.int4.group_size": 5})
    assert caught.value.field == "mismatch.int4.group_size"
