"""VACO's filter: which tokens go, by hand; identities; open-instruct's weights."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.correction import chain


def test_by_hand(rule, sampled, weigh):
    # Mean |r − 1|: .75 in the first two rows, .05 in the third. A > 0 drops r > 1, A < 0 drops r < 1.
    inputs = sampled([[2.0, 0.5], [2.0, 0.5], [1.05, 0.95]], advantage=[1.0, -1.0, 1.0])
    weight, keep = weigh(inputs, rule("vaco_tv"))
    assert weight == [[1.0] * 2] * 3
    assert keep == [[False, True], [True, False], [True, True]]
    assert all(all(row) for row in weigh(inputs, rule("vaco_tv", upper=0.751))[1])


def test_gradient_by_hand(rule, sampled, make_loss, grade):
    inputs = sampled([[2.0, 0.5]])
    graded = grade(make_loss("reinforce"), inputs, weights=chain([rule("vaco_tv")], inputs))
    torch.testing.assert_close(graded.grad_BT, torch.tensor([[0.0, -0.5]], dtype=torch.float64))


def test_without_advantage_nothing_is_dropped(rule, sampled, weigh):
    assert weigh(sampled([[5.0, 0.1]], advantage=[0.0]), rule("vaco_tv"))[1] == [[True, True]]


def test_either_sign_of_the_advantage_drops_the_other_half(rule, random_inputs):
    inputs = random_inputs(spread=2.0, rows=12)
    flipped = type(inputs)(**inputs.tensors() | {"advantage_B": -inputs.advantage_B})
    one, other = (~chain([rule("vaco_tv", upper=0.0)], x).keep_BT for x in (inputs, flipped))
    assert not (one & other).any()
    assert (one | other)[inputs.mask_BT].all()


def test_open_instruct(rule, agrees):
    make = lambda stem, **fields: rule(stem, anchor="old/mu", clamp_nats=10.0, **fields)  # noqa: E731
    rules = [make("token_tis"), make("vaco_tv", upper=1.05)]
    name = "open_instruct__rho_correction_grpo_loss__dapo_vaco_tv"
    agrees(name, rules, weight="rho_weights", everywhere=True)


def test_a_bound_from_below(rule, sampled, weigh):
    # Mean |r − 1| is .05: below .1 the token that leads away goes.
    assert weigh(sampled([[1.05, 0.95]]), rule("vaco_tv", lower=0.1))[1] == [[False, True]]


@pytest.mark.parametrize("upper", [-0.1, math.nan])
def test_refused(rule, upper):
    with pytest.raises(OptionError, match=r"vaco_tv\.upper"):
        rule("vaco_tv", upper=upper)
    with pytest.raises(OptionError, match=r"vaco_tv\.lower"):
        rule("vaco_tv", upper=0.2, lower=0.3)
