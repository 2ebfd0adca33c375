"""Truncated and tempered distributions: by hand, their identities, and the warpers of transformers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from stalefront.policy import token_logps
from stalefront.support import (
    attenuated,
    kl_full,
    pack_support,
    renormalised_logp,
    restricted_logp_BT,
    tail_mass,
    tempered,
    top_k_keep_BV,
    top_p_keep_BV,
)

INF = math.inf


def logs(*rows):
    """Logits whose softmax has these probabilities."""
    return torch.tensor(rows).log()


def sampled(*shape, seed=0, dtype=torch.float32):
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# What is kept


def test_top_p_by_hand():
    logits = logs([0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01])
    keep = {p: top_p_keep_BV(logits, p).int().tolist() for p in (0.3, 0.6, 0.8, 0.95)}
    # .5 reaches .3; .75 crosses .6; the token that crosses is kept.
    assert keep[0.3] == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert keep[0.6] == [[0, 1, 0, 1], [1, 0, 0, 0]]
    assert keep[0.8] == [[0, 1, 1, 1], [1, 0, 0, 0]]
    assert keep[0.95] == [[1, 1, 1, 1], [1, 0, 0, 0]]


def test_a_mass_that_is_reached_exactly_ends_the_set():
    quarters = torch.zeros(1, 4)
    assert top_p_keep_BV(quarters, 0.5).int().tolist() == [[1, 1, 0, 0]]
    assert top_p_keep_BV(quarters, 0.5 + 1e-9).int().tolist() == [[1, 1, 1, 0]]
    assert top_p_keep_BV(quarters, 1e-9).int().tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9, 0.99])
def test_top_p_is_that_of_transformers(p):
    logits = sampled(64, 101)
    reference = TopPLogitsWarper(p)(None, logits).isfinite()
    assert torch.equal(top_p_keep_BV(logits, p), reference)


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9, 0.99])
def test_the_kept_mass_reaches_p_and_without_its_least_token_does_not(p):
    logits = sampled(64, 101, dtype=torch.float64)
    kept = torch.where(top_p_keep_BV(logits, p), logits.softmax(-1), 0.0)
    assert (kept.sum(-1) >= p).all()
    least = torch.where(kept > 0, kept, 1.0).amin(-1)
    assert (kept.sum(-1) - least < p).all()


def test_all_of_the_mass_is_every_token():
    # Tokens of probability 0 too, and rows whose sums round above 1.
    logits = sampled(64, 1001)
    logits[:, 5] = -INF
    assert top_p_keep_BV(logits, 1.0).all()


def test_top_k_by_hand():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0], [-INF, -INF, 1.0, -INF]])
    assert top_k_keep_BV(logits, 1).int().tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
    assert top_k_keep_BV(logits, 3).int().tolist() == [[0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0]]
    assert top_k_keep_BV(logits, 4).all()
    assert top_k_keep_BV(logits, 9).all()


@pytest.mark.parametrize("k", [1, 2, 20, 100])
def test_top_k_is_that_of_transformers_where_nothing_ties(k):
    logits = sampled(64, 101, seed=2)
    assert torch.equal(top_k_keep_BV(logits, k), TopKLogitsWarper(k)(None, logits).isfinite())
    assert (top_k_keep_BV(logits.round(), k).sum(-1) == k).all()


@pytest.mark.parametrize("keep", [lambda z: top_p_keep_BV(z, 0.3), lambda z: top_k_keep_BV(z, 2)], ids=["p", "k"])
def test_rows_with_nan_keep_everything_and_leave_others_alone(keep):
    logits = sampled(4, 9)
    other = keep(logits)[[0, 2, 3]]
    logits[1, 4] = math.nan
    assert keep(logits)[1].all()
    assert torch.equal(keep(logits)[[0, 2, 3]], other)
    assert renormalised_logp(logits, keep(logits))[1].isnan().all()


# Partial cuts and temperatures


def test_attenuation_by_hand():
    logits, keep = logs([0.5, 0.3, 0.2]), torch.tensor([[True, False, True]])
    # The cut token keeps a third of its weight: .5, .1, .2 of .8.
    got = attenuated(logits, keep, 2 / 3).softmax(-1)
    torch.testing.assert_close(got, torch.tensor([[0.625, 0.125, 0.25]]))
    assert attenuated(logits, keep, 0) is logits
    assert attenuated(logits, keep, 1)[0].tolist() == [logits[0, 0], -INF, logits[0, 2]]


def test_a_whole_cut_is_that_of_transformers():
    logits = sampled(16, 50)
    assert torch.equal(attenuated(logits, top_p_keep_BV(logits, 0.8), 1.0), TopPLogitsWarper(0.8)(None, logits))
    assert torch.equal(attenuated(logits, top_k_keep_BV(logits, 7), 1.0), TopKLogitsWarper(7)(None, logits))


def test_a_cut_hides_no_nan():
    logits = torch.tensor([[0.0, math.nan, 1.0]])
    for strength in (0, 0.5, 1):
        assert attenuated(logits, torch.tensor([[True, False, True]]), strength)[0, 1].isnan()


def test_temperature_by_hand():
    logits = torch.tensor([[1.0, -4.0]])
    assert tempered(logits, 4.0, 0.5).tolist() == [[0.5, -2.0]]
    assert tempered(logits, 0.25, 1.0).tolist() == [[4.0, -16.0]]
    assert tempered(logits, 0.25, 0) is logits


def test_temperatures_multiply_and_the_whole_one_is_that_of_transformers():
    logits = sampled(16, 50, dtype=torch.float64)
    assert torch.equal(tempered(logits, 0.6, 1.0), TemperatureLogitsWarper(0.6)(None, logits))
    torch.testing.assert_close(tempered(tempered(logits, 0.6, 0.3), 0.6, 0.7), logits / 0.6)


def test_renormalisation_by_hand():
    keep = torch.tensor([[True, False, True]])
    got = renormalised_logp(logs([0.5, 0.3, 0.2]), keep).exp()
    torch.testing.assert_close(got, torch.tensor([[5 / 7, 0, 2 / 7]]))
    # A constant on all logits cancels.
    torch.testing.assert_close(renormalised_logp(logs([0.5, 0.3, 0.2]) + 3, keep).exp(), got)


def test_renormalised_over_everything_is_log_softmax():
    logits = sampled(5, 30)
    assert torch.equal(renormalised_logp(logits, torch.ones(5, 30, dtype=torch.bool)), logits.log_softmax(-1))


# Packed supports


def test_packing_by_hand():
    keep = torch.tensor([[0, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 0, 0, 1]]).bool()
    got = pack_support(keep)
    assert got.dtype == torch.int32
    assert got.tolist() == [[1, 3, -1], [-1, -1, -1], [4, -1, -1], [0, 1, 4]]
    assert pack_support(keep[1:2]).shape == (1, 0)
    assert pack_support(keep[:0]).shape == (0, 0)


def test_packing_loses_nothing():
    keep = top_p_keep_BV(sampled(40, 60), 0.9)
    packed = pack_support(keep)
    assert packed.shape[1] == keep.sum(-1).max()
    for row, ids in zip(keep, packed.tolist(), strict=True):
        assert [i for i in ids if i >= 0] == row.nonzero().flatten().tolist()


# Log-probs on a support


def test_restricted_by_hand_with_its_gradient():
    logits = logs([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]).double().requires_grad_()
    support = torch.tensor([[[0, 2], [1, -1], [0, 2]]], dtype=torch.int32)
    got = restricted_logp_BT(logits, support, torch.tensor([[2, 1, 1]]))
    assert got.logp_BT[0].tolist() == pytest.approx([math.log(2 / 7), 0.0, -INF])
    entropy = -(5 / 7 * math.log(5 / 7) + 2 / 7 * math.log(2 / 7))
    assert got.entropy_BT[0].tolist() == pytest.approx([entropy, 0.0, entropy])
    got.logp_BT.sum().backward()
    # δ_v − p_v on the support; nothing for a single token, nor for a token outside.
    expected = torch.tensor([[[-5 / 7, 0, 5 / 7], [0, 0, 0], [0, 0, 0]]], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected)


def test_restricted_is_the_masked_softmax():
    logits, tokens = sampled(4, 6, 40, dtype=torch.float64), torch.arange(24).view(4, 6) % 40
    keep = top_p_keep_BV(logits.flatten(0, 1), 0.9)
    support = pack_support(keep).view(4, 6, -1)
    one, other = (logits.clone().requires_grad_() for _ in range(2))
    got = restricted_logp_BT(one, support, tokens)
    reference = torch.distributions.Categorical(
        logits=other.masked_fill(~keep.view_as(other), -1e9), validate_args=False
    )
    inside = keep.view(4, 6, 40).gather(-1, tokens[..., None]).squeeze(-1)
    assert 0 < inside.sum() < 24
    torch.testing.assert_close(got.logp_BT[inside], reference.log_prob(tokens)[inside])
    assert (got.logp_BT[~inside] == -INF).all()
    torch.testing.assert_close(got.entropy_BT, reference.entropy())
    got.logp_BT[inside].sum().backward()
    reference.log_prob(tokens)[inside].sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_the_gradient_is_that_of_finite_differences():
    logits = sampled(2, 3, 7, dtype=torch.float64).requires_grad_()
    support = torch.tensor([[[0, 3, 6], [2, -1, -1], [-1, -1, -1]], [[4, 5, -1], [-1, -1, -1], [1, 2, 3]]])
    tokens = torch.tensor([[3, 2, 0], [4, 6, 1]])
    assert torch.autograd.gradcheck(lambda z: restricted_logp_BT(z, support, tokens).logp_BT, logits)


@pytest.mark.parametrize("slots", [0, 3])
def test_without_a_support_it_is_the_log_prob_of_the_trainer(slots):
    logits = sampled(3, 5, 11)

    class Table(torch.nn.Module):
        def forward(self, input_ids, logits_to_keep, **_):
            return type("Out", (), {"logits": logits[:, -logits_to_keep:]})

    tokens = torch.arange(15).view(3, 5) % 11
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[:, 0] = False
    trainer = token_logps(Table(), tokens, torch.arange(5).expand(3, 5), mask, temperature=1.0)
    support = torch.full((3, 4, slots), -1, dtype=torch.int32)
    got = restricted_logp_BT(logits[:, :-1], support, tokens[:, 1:])
    assert torch.equal(got.logp_BT, trainer.logp_BT[:, 1:])
    assert torch.equal(got.entropy_BT, trainer.entropy_BT[:, 1:])


def test_rows_with_and_without_a_support_do_not_disturb_each_other():
    logits, tokens = sampled(2, 4, 9), torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    support = torch.full((2, 4, 3), -1, dtype=torch.int32)
    support[0, 1] = torch.tensor([1, 4, 8])
    support[1, 2] = torch.tensor([6, 7, -1])
    got = restricted_logp_BT(logits, support, tokens)
    for b in range(2):
        for t in range(4):
            alone = restricted_logp_BT(logits[b, t][None, None], support[b, t][None, None], tokens[b, t][None, None])
            assert torch.equal(alone.logp_BT[0, 0], got.logp_BT[b, t])
            assert torch.equal(alone.entropy_BT[0, 0], got.entropy_BT[b, t])


def test_nan_in_a_support_is_seen_inside_and_outside_of_it():
    logits = torch.tensor([[[0.0, math.nan, 1.0, 2.0]]]).expand(1, 3, 4)
    support = torch.tensor([[[0, 1], [0, 1], [0, 2]]])
    got = restricted_logp_BT(logits, support, torch.tensor([[0, 3, 2]]))
    assert got.logp_BT[0, :2].isnan().all()
    assert got.entropy_BT[0, :2].isnan().all()
    # Where no NaN is kept the distribution is a number.
    assert got.logp_BT[0, 2].item() == pytest.approx(-math.log1p(math.exp(-1)))


# Tails and divergences


def test_tail_mass_by_hand():
    logp = logs([0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]).double()
    torch.testing.assert_close(tail_mass(logp, 0.2), torch.tensor([0.2, 0.0], dtype=torch.float64))
    assert tail_mass(logp, 0.0).tolist() == [0.0, 0.0]
    torch.testing.assert_close(tail_mass(logp, 1.1), torch.ones(2, dtype=torch.float64))
    assert tail_mass(torch.tensor([[math.nan, -1.0]]), 0.1).isnan().all()


def test_tail_mass_and_what_is_left_is_everything():
    logp = sampled(16, 200).log_softmax(-1)
    kept = torch.where(logp.double().exp() < 1e-3, 0.0, logp.double().exp()).sum(-1)
    torch.testing.assert_close(tail_mass(logp, 1e-3) + kept, torch.ones(16, dtype=torch.float64), rtol=1e-6, atol=0)
    assert (tail_mass(logp, 1e-3) > 0).all()


def test_kl_by_hand_with_its_gradient():
    p, q = [0.5, 0.3, 0.2, 0.0], [0.25, 0.3, 0.45, 0.0]
    logp, other = (logs(x).double().requires_grad_() for x in (p, q))
    kl = kl_full(logp, other)
    assert kl.item() == pytest.approx(0.5 * math.log(2) + 0.2 * math.log(0.2 / 0.45))
    kl.sum().backward()
    # p (log p − log q + 1) and −p.
    by_logp = [0.5 * (math.log(2) + 1), 0.3, 0.2 * (math.log(0.2 / 0.45) + 1), 0.0]
    assert logp.grad[0].tolist() == pytest.approx(by_logp)
    assert other.grad[0].tolist() == pytest.approx([-0.5, -0.3, -0.2, 0.0])


def test_kl_where_a_probability_is_zero():
    half, one = logs([0.5, 0.5]), logs([1.0, 0.0])
    assert kl_full(half, one).item() == INF
    assert kl_full(one, half).item() == pytest.approx(math.log(2))
    assert kl_full(one, one).item() == 0.0
    nan = torch.tensor([[-0.5, math.nan]])
    assert kl_full(nan, half).isnan().all()
    assert kl_full(half, nan).isnan().all()
    assert kl_full(one, nan).isnan().all()


def test_kl_against_torch():
    logp, other = (sampled(16, 200, seed=seed, dtype=torch.float64).log_softmax(-1) for seed in (0, 1))
    reference = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=logp), torch.distributions.Categorical(logits=other)
    )
    torch.testing.assert_close(kl_full(logp, other), reference)
    assert kl_full(logp, logp).tolist() == [0.0] * 16


def test_kl_of_a_cut_is_the_log_of_the_kept_mass():
    # Of the cut distribution from the whole one, on every row: Σ p/M log(1/M) = −log M.
    logits = sampled(16, 100, dtype=torch.float64)
    keep = top_p_keep_BV(logits, 0.9)
    mass = torch.where(keep, logits.softmax(-1), 0.0).sum(-1)
    torch.testing.assert_close(kl_full(renormalised_logp(logits, keep), logits.log_softmax(-1)), -mass.log())
    cut = kl_full(logits.log_softmax(-1), renormalised_logp(logits, keep))
    assert (cut == INF).all()
