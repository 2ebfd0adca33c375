"""KPop: the binary divergences by hand and against torch's, identities, and AReaL's masks."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.batch import LossInputs
from stalefront.choice import OptionError
from stalefront.correction import chain
from stalefront.ratios import bernoulli_kl


def pair(top: float, bottom: float) -> LossInputs:
    theta, mu = (torch.tensor([[p]], dtype=torch.float64).log() for p in (top, bottom))
    return LossInputs(theta, theta, mu, None, torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool))


def test_by_hand(rule, weigh):
    # KL(½ ‖ ¼) = ½ log 2 + ½ log ⅔ = .1438, KL(¼ ‖ ½) = ¼ log ½ + ¾ log 3/2 = .1308.
    inputs = pair(0.5, 0.25)
    assert weigh(inputs, rule("kpop", upper=0.144)) == ([[pytest.approx(2.0)]], [[True]])
    assert weigh(inputs, rule("kpop", upper=0.143)) == ([[0.0]], [[False]])
    assert weigh(inputs, rule("kpop", upper=0.144, weight="one")) == ([[1.0]], [[True]])
    # The other direction alone would have kept it.
    assert weigh(pair(0.25, 0.5), rule("kpop", upper=0.143))[1] == [[False]]


def test_gradient_by_hand(rule, make_loss, grade):
    inputs = pair(0.5, 0.25)
    graded = grade(make_loss("reinforce"), inputs, weights=chain([rule("kpop", upper=0.144)], inputs))
    assert graded.grad_BT.item() == pytest.approx(-2.0)


def test_divergence_against_torch():
    random = torch.Generator().manual_seed(0)
    p, q = (torch.rand(50, generator=random, dtype=torch.float64).clamp(1e-3, 1 - 1e-3) for _ in range(2))
    bernoulli = torch.distributions.Bernoulli
    expected = torch.distributions.kl_divergence(bernoulli(p), bernoulli(q))
    torch.testing.assert_close(bernoulli_kl(p.log(), q.log()), expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(bernoulli_kl(p.log(), p.log()), torch.zeros_like(p))


@pytest.mark.parametrize(
    ("p", "q", "value"), [(1.0, 1.0, 0.0), (0.0, 0.5, math.log(2)), (0.5, 1.0, math.inf), (0.5, 0.0, math.inf)]
)
def test_certain_and_impossible_tokens(p, q, value):
    p, q = (torch.tensor([x], dtype=torch.float64).log() for x in (p, q))
    assert bernoulli_kl(p, q).item() == pytest.approx(value)


def test_a_rare_token_may_have_any_ratio(rule, weigh):
    assert weigh(pair(1e-6, 1e-8), rule("kpop"))[0] == [[pytest.approx(100.0)]]


def test_smoothing_keeps_certain_tokens_finite(rule, weigh):
    # Held within [.1, .9]: KL(.9 ‖ .9) = 0, where 1 and .95 have an infinite divergence.
    assert weigh(pair(0.95, 1.0), rule("kpop"))[1] == [[False]]
    assert weigh(pair(0.95, 1.0), rule("kpop", smoothing=0.1))[1] == [[True]]


def test_areal(rule, agrees):
    for name, upper in (("005", 0.05), ("05", 0.5)):
        agrees(
            f"areal__ppo_actor_loss_fn__kpop_binary_kl_{name}",
            [rule("kpop", anchor="old/mu", upper=upper)],
            weight="behave_imp_weight",
            keep="behave_mask",
            dtype=torch.float32,
            everywhere=True,
        )


@pytest.mark.parametrize("upper", [-0.1, math.inf, math.nan])
def test_refused(rule, upper):
    with pytest.raises(OptionError, match=r"kpop\.upper"):
        rule("kpop", upper=upper)
