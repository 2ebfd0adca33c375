"""ESTR: bands that widen with the entropy, by hand and against a loop; identities; a cell that records the entropy."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.correction import chain


def entropy(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_by_hand(rule, sampled, weigh):
    # l² = 1 and .25 with H + ε = .5, .5, 2: 2, .5, .5.
    inputs = sampled([[math.e, math.exp(0.5), 1 / math.e]], entropy_behav_BT=entropy(0.49, 0.49, 1.99))
    weight, keep = weigh(inputs, rule("estr"))
    assert weight == [[1.0] * 3]
    assert keep == [[False, True, True]]
    assert weigh(inputs, rule("estr", tau=0.4))[1] == [[False, False, False]]


def test_gradient_by_hand(rule, sampled, make_loss, grade):
    inputs = sampled([[math.e, math.exp(0.5)]], entropy_behav_BT=entropy(0.49, 0.49))
    graded = grade(make_loss("reinforce"), inputs, weights=chain([rule("estr")], inputs))
    torch.testing.assert_close(graded.grad_BT, torch.tensor([[0.0, -0.5]], dtype=torch.float64))


def test_a_certain_token_has_the_band_of_epsilon(rule, sampled, weigh):
    inputs = sampled([[math.exp(0.09), math.exp(0.11)]], entropy_behav_BT=entropy(0.0, 0.0))
    assert weigh(inputs, rule("estr"))[1] == [[True, False]]


def test_at_one_entropy_it_is_a_token_mask_of_k2(rule, random_inputs):
    inputs = random_inputs(rows=12)
    inputs = type(inputs)(**inputs.tensors(), entropy_behav_BT=torch.full_like(inputs.logp_theta_BT, 0.49))
    one = chain([rule("estr", tau=0.5)], inputs).keep_BT
    other = chain([rule("token_mask", statistic="k2", low=None, high=0.125)], inputs).keep_BT
    assert torch.equal(one, other)


def test_against_a_loop(rule, random_inputs):
    inputs = random_inputs(rows=12, seed=3)
    random = torch.Generator().manual_seed(0)
    surprise = torch.rand(inputs.mask_BT.shape, generator=random, dtype=torch.float64)
    inputs = type(inputs)(**inputs.tensors(), entropy_behav_BT=surprise)
    keep = chain([rule("estr", tau=0.3, epsilon=0.05)], inputs).keep_BT
    for row, column in inputs.mask_BT.nonzero().tolist():
        moved = float(inputs.logp_theta_BT[row, column] - inputs.logp_behav_BT[row, column])
        assert bool(keep[row, column]) == (moved**2 <= 0.3 * (float(surprise[row, column]) + 0.05))


def test_refused(rule):
    with pytest.raises(OptionError, match=r"estr\.epsilon"):
        rule("estr", epsilon=0.0)
    with pytest.raises(OptionError, match=r"estr\.tau"):
        rule("estr", tau=-1.0)
