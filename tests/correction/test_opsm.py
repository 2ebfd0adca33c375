"""OPSM: which sequences go, by hand; identities; the masks of slime and TRL."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.correction import chain

# Mean log base/θ per sequence: log 2, log 2, 0, −log 2.
ROWS = [[0.25, 1.0], [0.25, 1.0], [1.0, 1.0], [2.0, 2.0]]


def test_by_hand(rule, sampled, weigh):
    inputs = sampled(ROWS, advantage=[-1.0, 1.0, -1.0, -1.0])
    weight, keep = weigh(inputs, rule("opsm"))
    assert weight == [[1.0] * 2] * 4
    assert keep == [[False] * 2, [True] * 2, [True] * 2, [True] * 2]
    assert all(all(row) for row in weigh(inputs, rule("opsm", delta=0.7))[1])
    assert weigh(inputs, rule("opsm", delta=0.69))[1][0] == [False] * 2


def test_gradient_by_hand(rule, sampled, make_loss, grade):
    inputs = sampled(ROWS[:2], advantage=[-1.0, 1.0])
    graded = grade(make_loss("reinforce"), inputs, weights=chain([rule("opsm")], inputs))
    torch.testing.assert_close(graded.grad_BT, torch.tensor([[0.0, 0.0], [-0.25, -0.25]], dtype=torch.float64))


def test_whose_sign(rule, sampled, weigh):
    # Advantages of −3 and 1 in one sequence: it is bad on average, and its second token is not.
    inputs = sampled([[0.25, 1.0]], advantage=[[-3.0, 1.0]])
    assert weigh(inputs, rule("opsm", sign="sequence"))[1] == [[False, False]]
    assert weigh(inputs, rule("opsm", sign="token"))[1] == [[False, True]]
    inputs = sampled([[0.25, 1.0]], advantage=[[-1.0, 3.0]])
    assert weigh(inputs, rule("opsm", sign="sequence"))[1] == [[True, True]]


def test_good_answers_are_never_dropped_and_signs_agree_for_whole_sequences(rule, random_inputs):
    inputs = random_inputs(spread=2.0, rows=20)
    one, other = (chain([rule("opsm", sign=sign)], inputs).keep_BT for sign in ("sequence", "token"))
    assert torch.equal(one, other)
    assert one[inputs.advantage_B >= 0].all()


def test_a_mean_that_is_no_number_is_not_spared(rule, sampled):
    inputs = sampled(ROWS[:2], advantage=[-1.0, 1.0])
    broken = replace(inputs, logp_theta_BT=torch.full_like(inputs.logp_theta_BT, math.nan))
    assert not chain([rule("opsm")], broken).keep_BT.any()


def test_peers(rule, agrees):
    slime = "slime__compute_opsm_mask__opsm_{}"
    cases = [("1e-4", "theta/old", 1e-4), ("old_03", "theta/old", 0.3), ("mu_10", "theta/mu", 1.0)]
    for name, anchor, delta in (*cases, ("mu_1e-4", "theta/mu", 1e-4)):
        agrees(slime.format(name), [rule("opsm", anchor=anchor, delta=delta, sign="token")], keep="opsm_mask")
    trl = "trl__GRPOTrainer_compute_loss__{}"
    for name, delta in (("opsm_10", 1.0), ("opsm_1e-4", 1e-4)):
        agrees(trl.format(name), [rule("opsm", delta=delta)], keep="off_policy_mask")
    tokens = rule("opsm", delta=1.0, sign="token")
    agrees(trl.format("edge_dapo_opsm_token_mask"), [tokens], keep="off_policy_mask")


def test_refused(rule):
    with pytest.raises(OptionError, match=r"opsm\.anchor"):
        rule("opsm", anchor="old/mu")
    with pytest.raises(OptionError, match=r"opsm\.delta"):
        rule("opsm", delta=-1.0)
