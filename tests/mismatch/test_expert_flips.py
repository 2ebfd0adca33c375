"""Flipped experts: choices by hand, the rate, and routes that a replay repeats."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.noise import row_keys
from stalefront.policy import token_logps

SCORES = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4]])
OWN = torch.tensor([[0, 2], [3, 2]])


def test_the_weakest_chosen_gives_way_to_the_strongest_other(entry):
    change = entry("expert_flips", rate=1.0).change(row_keys(0, "test", 1, 2), torch.zeros(2, dtype=torch.int64))
    # Expert 3 for expert 2 in its place, and expert 1 for expert 2; logits are left alone.
    assert change.choose(SCORES, OWN, 0).tolist() == [[0, 3], [3, 1]]
    assert change.choose(SCORES, OWN.flip(-1), 0).tolist() == [[3, 0], [1, 3]]
    assert change.logits(SCORES, 0) is SCORES


@pytest.mark.parametrize(("rate", "strength"), [(0.1, 1.0), (0.1, 3.0), (0.5, 0.5)])
def test_the_rate_is_strength_times_rate(rate, strength, entry):
    tokens = 20_000
    scores = torch.rand(tokens, 8, generator=torch.Generator().manual_seed(0))
    own = scores.topk(2).indices
    change = entry("expert_flips", rate=rate, strength=strength).change(
        row_keys(0, "test", 1, tokens), torch.arange(tokens)
    )
    found = [change.choose(scores, own, layer) for layer in (0, 1)]
    error = math.sqrt(strength * rate * (1 - strength * rate) / tokens)
    for chosen in found:
        assert torch.equal(chosen[:, 0], own[:, 0])
        assert abs(float((chosen != own).any(-1).double().mean()) - strength * rate) < 4 * error
    assert not torch.equal(*found)


def test_a_decode_takes_the_routes_it_records(make_learner, draw):
    made = make_learner("expert_flips", model="tiny_moe", **{"mismatch.expert_flips.rate": 0.5})
    samples = draw(made).samples
    inputs = (samples.tokens_BT, samples.position_BT, samples.mask_BT)
    tap = made.source.inference.tap_of(made.parts.model)
    with torch.no_grad():
        plain = token_logps(made.parts.model, *inputs, temperature=1.0)
        with tap.replaying(samples.routes_LBTK):
            replayed = token_logps(made.parts.model, *inputs, temperature=1.0)
    torch.testing.assert_close(replayed.logp_BT, samples.logp_behav_BT, rtol=0, atol=1e-5)
    assert (plain.logp_BT - samples.logp_behav_BT).abs().max() > 1e-4


def test_the_first_layer_flips_at_the_rate(make_learner):
    # Nothing before its router differs from the trainer, so that its flips are the injected ones alone.
    made = make_learner("expert_flips", model="tiny_moe", **{"mismatch.expert_flips.rate": 0.3, "task.num_prompts": 32})
    _, row = made.advance()
    decisions = row["tokens"]
    assert abs(row["expert_flip_layer_0_frac"] - 0.3) < 4 * math.sqrt(0.3 * 0.7 / (decisions - 128))
    assert row["expert_flip_token_frac"] > row["expert_flip_layer_0_frac"]


def test_replaying_them_takes_the_mismatch_away(make_learner):
    rows = {}
    for replay in ("none", "r3"):
        made = make_learner("expert_flips", model="tiny_moe", replay=replay, **{"mismatch.expert_flips.rate": 0.5})
        rows[replay] = made.advance()[1]
    assert rows["none"]["mismatch_k3_nats"] > 1e-5
    assert abs(rows["r3"]["mismatch_k3_nats"]) < 1e-9


def test_options(entry, refused):
    assert entry("expert_flips").needs_experts
    assert entry("expert_flips", rate=0.1, strength=10.0).strength == 10.0
    assert entry("expert_flips", rate=0.25).scaled(100.0).strength == 4.0
    refused("expert_flips", "strength", rate=0.1, strength=10.1)
    for rate in (0.0, -0.1, 1.1, math.nan):
        refused("expert_flips", "rate", rate=rate)
