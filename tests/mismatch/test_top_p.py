"""Nucleus sampling: cuts by hand and by sorting, what the log says, and a trainer that is told the support."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.inference import Inference
from stalefront.mismatch import Noise
from stalefront.policy import token_logps

NO_NOISE = Noise(torch.zeros(1, dtype=torch.int64), 0)
HALF = {"mismatch.top_p.p": 0.5}


def nucleus(logp_V, p):
    """Renormalised distribution over the fewest words whose mass reaches p, word by word."""
    kept, mass = [], 0.0
    for word in sorted(range(len(logp_V)), key=lambda word: -float(logp_V[word])):
        kept.append(word)
        mass += math.exp(logp_V[word])
        if mass >= p:
            break
    return [float(logp_V[word]) - math.log(mass) if word in kept else -math.inf for word in range(len(logp_V))]


def test_values_by_hand(entry):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    found = entry("top_p", p=0.7)(logits, NO_NOISE).softmax(-1)
    assert found.tolist()[0] == pytest.approx([0.625, 0.375, 0.0, 0.0])
    # What is cut keeps a quarter of its 0.2: 0.85 in all.
    part = entry("top_p", p=0.7, strength=0.75)(logits, NO_NOISE).softmax(-1)
    assert part.tolist()[0] == pytest.approx([0.5 / 0.85, 0.3 / 0.85, 0.0375 / 0.85, 0.0125 / 0.85])
    assert entry("top_p", p=0.7, strength=0.0)(logits, NO_NOISE) is logits
    assert entry("top_p", p=0.7).keep_BV(logits) is None
    assert entry("top_p", p=0.7, keep_mask=True).keep_BV(logits).tolist() == [[True, True, False, False]]


def test_a_rollout_is_drawn_from_the_renormalised_nucleus(make_learner, draw, decoded):
    made = make_learner("top_p", **HALF)
    drawn = draw(made)
    plain = decoded(made.parts.model, drawn)
    expected = torch.tensor([[nucleus(row, 0.5) for row in rows] for rows in plain.tolist()])
    torch.testing.assert_close(drawn.logp_BCV, expected, rtol=0, atol=1e-5)
    # The signature of a truncated support logged renormalised: ratios are the kept mass, always below 1.
    log_ratio = plain.gather(-1, drawn.tokens_BC[..., None]).squeeze(-1) - drawn.written_BC
    kept_mass = (plain.exp() * drawn.logp_BCV.isfinite()).sum(-1)
    torch.testing.assert_close(log_ratio.exp()[drawn.mask_BC], kept_mass[drawn.mask_BC], rtol=1e-4, atol=0)


def test_raw_log_probs_are_those_of_the_whole_vocabulary(make_learner, draw, decoded):
    made = make_learner("top_p", **HALF, **{"mismatch.top_p.logged": "raw"})
    drawn = draw(made)
    own = decoded(made.parts.model, drawn).gather(-1, drawn.tokens_BC[..., None]).squeeze(-1)
    torch.testing.assert_close(drawn.written_BC[drawn.mask_BC], own[drawn.mask_BC], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def kept(make_learner):
    """A cell that keeps the mask, after one learner step."""
    made = make_learner("top_p", **HALF, **{"mismatch.top_p.keep_mask": True})
    return made, made.advance()[1]


def test_with_the_mask_old_is_the_restricted_policy(kept):
    made, row = kept
    batch = made.batch
    assert abs(row["mismatch_k3_nats"]) < 1e-10
    assert row["old_mu_ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(batch.logp_old_BT, batch.logp_behav_BT, rtol=0, atol=1e-5)
    # On the first step θ is old, on the same support.
    assert row["theta_old_ratio_max"] == 1.0
    kept_of = (batch.support_BTK >= 0).sum(-1)[batch.mask_BT]
    assert (kept_of >= 1).all()
    assert kept_of.max() < 16


def test_gradient_goes_through_kept_tokens_only(kept):
    made, _ = kept
    batch, model, seen = made.batch, made.parts.model, []

    def keep(_, __, out):
        out.retain_grad()
        seen.append(out)

    handle = model.lm_head.register_forward_hook(keep)
    scored = token_logps(
        model, batch.tokens_BT, batch.position_BT, batch.mask_BT, temperature=1.0, support_BTK=batch.support_BTK
    )
    handle.remove()
    scored.logp_BT[batch.mask_BT].sum().backward()
    model.zero_grad()
    first = batch.tokens_BT.shape[1] - (seen[0].shape[1] - 1)
    grad_BCV, mask_BC, support_BCK = seen[0].grad[:, :-1], batch.mask_BT[:, first:], batch.support_BTK[:, first:]
    inside = torch.zeros(*grad_BCV.shape[:2], 17, dtype=torch.bool).scatter(-1, support_BCK.long() % 17, True)[..., :16]
    assert (grad_BCV[~inside & mask_BC[..., None]] == 0).all()
    assert (grad_BCV[~mask_BC] == 0).all()
    # d log p(token) / dz = 1 − p at the token, −p elsewhere.
    several = inside.sum(-1) > 1
    restricted = seen[0][:, :-1].detach().masked_fill(~inside, -math.inf).softmax(-1)
    onehot = torch.nn.functional.one_hot(batch.tokens_BT[:, first:], 16)
    expected = (onehot - restricted)[mask_BC & several]
    torch.testing.assert_close(grad_BCV[mask_BC & several], expected, rtol=0, atol=1e-5)
    assert expected.abs().max() > 0.1


def test_without_the_mask_the_cut_is_mismatch(make_learner):
    made = make_learner("top_p", **HALF)
    _, row = made.advance()
    assert made.batch.support_BTK is None
    assert row["mismatch_k1_nats"] > row["mismatch_k3_nats"] > 1e-3
    assert row["old_mu_ratio_mean"] < 0.9


def test_options(refused, make_cell):
    for value in (0.0, 1.0, -0.1, math.nan):
        refused("top_p", "p", p=value)
    refused("top_p", "strength", strength=0.5, keep_mask=True)
    mask = {"mismatch.top_p.keep_mask": True}
    with pytest.raises(OptionError) as error:
        make_cell(mismatch=["top_p"], **mask, **{"mismatch.top_p.logged": "raw"})
    assert error.value.field == "mismatch.top_p.logged"
    with pytest.raises(OptionError) as error:
        make_cell(mismatch=["top_p"], **mask, **{"mismatch.target_kl": 1e-3})
    assert error.value.field == "mismatch.target_kl"


def test_a_cut_after_raw_logits_is_that_of_what_is_drawn(entry):
    """The log of a colder sampler, written down raw, is cut where the colder sampler is cut."""
    temperature, top_p = entry("temperature", temperature=3.0, logged="raw"), entry("top_p", p=0.6)
    inference = Inference(1.0, [temperature, top_p])
    logits_BV = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    keys = {name: torch.zeros(1, dtype=torch.int64) for name in ("temperature", "top_p")}
    found = inference.process(logits_BV, keys, 0)
    kept = top_p.kept_BV(logits_BV / 3)
    assert kept.sum() > top_p.kept_BV(logits_BV).sum()
    assert torch.equal(found.logp_BV > -torch.inf, kept)
    assert torch.equal(found.logged_BV > -torch.inf, kept)
    assert torch.allclose(found.logged_BV[kept], torch.log_softmax(logits_BV[kept], -1))
