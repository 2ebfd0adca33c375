"""Near ties broken at random: choices by hand, their shares, and gates that are all alike."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.noise import row_keys
from stalefront.policy import token_logps
from stalefront.routing import find_routers

TOKENS = 30_000


def chosen(entry, scores, k, **fields):
    """Choices of many tokens with the same scores."""
    scores_NE = torch.tensor(scores, dtype=torch.float64).expand(TOKENS, -1)
    change = entry("router_ties", **fields).change(row_keys(0, "test", 1, TOKENS), torch.arange(TOKENS))
    assert change.logits(scores_NE, 0) is scores_NE
    return change.choose(scores_NE, scores_NE.topk(k).indices, 0)


def shares(choice_NK, experts):
    """How often each expert was taken."""
    return [float((choice_NK == expert).any(-1).double().mean()) for expert in range(experts)]


def test_of_three_that_tie_each_pair_is_as_likely(entry):
    found = shares(chosen(entry, [0.3, 0.1, 0.3, 0.3], 2, tolerance=1e-6), 4)
    assert found[1] == 0.0
    assert [found[e] for e in (0, 2, 3)] == pytest.approx([2 / 3] * 3, abs=4 * math.sqrt(2 / 9 / TOKENS))


def test_a_clear_winner_stays_and_comes_first(entry):
    choice = chosen(entry, [0.2, 0.5, 0.195, 0.1], 2, tolerance=0.01)
    assert (choice[:, 0] == 1).all()
    found = shares(choice, 4)
    assert found[3] == 0.0
    assert [found[0], found[2]] == pytest.approx([0.5, 0.5], abs=2 / math.sqrt(TOKENS))


def test_clear_winners_stay_in_their_order(entry):
    choice = chosen(entry, [0.2, 0.5, 0.195, 0.6, 0.1], 3, tolerance=0.01)
    assert (choice[:, :2] == torch.tensor([3, 1])).all()
    assert set(choice[:, 2].tolist()) == {0, 2}


def test_the_tolerance_reaches_both_ways_and_is_scaled(entry):
    # Within 0.02 of the weakest chosen score 0.3 lie the one above it and the one below.
    scores = [0.31, 0.3, 0.285, 0.1]
    assert min(shares(chosen(entry, scores, 2, tolerance=0.01, strength=2.0), 4)[:3]) > 0.6
    assert shares(chosen(entry, scores, 2, tolerance=0.01), 4) == [1.0, 1.0, 0.0, 0.0]


def test_without_ties_the_choice_is_the_own_one(entry):
    scores = torch.rand(500, 8, generator=torch.Generator().manual_seed(0))
    own = scores.topk(2).indices
    change = entry("router_ties", tolerance=1e-9).change(row_keys(0, "test", 1, 500), torch.arange(500))
    assert torch.equal(change.choose(scores, own, 0), own)


def test_gates_that_are_all_alike_take_every_expert_as_often(make_learner, draw):
    made = make_learner("router_ties", model="tiny_moe", **{"task.num_prompts": 32})
    with torch.no_grad():
        for router in find_routers(made.parts.model):
            router.weight.zero_()
    samples = draw(made).samples
    routes_LNK = samples.routes_LBTK[:, :, 6:][(samples.routes_LBTK[:, :, 6:] >= 0).all(-1)]
    counts = routes_LNK.long().flatten().bincount(minlength=8)
    assert (counts / len(routes_LNK) - 0.25).abs().max() < 5 * math.sqrt(0.25 * 0.75 / len(routes_LNK))
    # They are the ones that were used.
    inputs = (samples.tokens_BT, samples.position_BT, samples.mask_BT)
    tap = made.source.inference.tap_of(made.parts.model)
    with torch.no_grad(), tap.replaying(samples.routes_LBTK):
        replayed = token_logps(made.parts.model, *inputs, temperature=1.0)
    torch.testing.assert_close(replayed.logp_BT, samples.logp_behav_BT, rtol=0, atol=1e-5)


def test_options(entry, refused, make_cell):
    assert entry("router_ties").needs_experts
    for tolerance in (0.0, -1.0, math.nan, math.inf):
        refused("router_ties", "tolerance", tolerance=tolerance)
    with pytest.raises(OptionError) as error:
        make_cell(mismatch=["router_ties"], model="tiny_moe", **{"model.deterministic_topk": True})
    assert error.value.field == "model.deterministic_topk"
