"""Noise on gates: values by hand, and a decode that one teacher-forced forward with the same noise repeats."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.mismatch.router_noise import LAYERS, NoisyGates
from stalefront.model import clean_copy
from stalefront.noise import normals, row_keys
from stalefront.policy import token_logps
from stalefront.routing import RouterTap


def test_values_by_hand(entry):
    key_N, position_N = row_keys(0, "test", 1, 3), torch.tensor([0, 4, 4])
    change = entry("router_noise", sigma=0.5, strength=2.0).change(key_N, position_N)
    logits = torch.zeros(3, 8)
    found = change.logits(logits, layer=1)
    assert torch.equal(found, normals(key_N, position_N * LAYERS + 1, 8))
    assert not torch.equal(change.logits(logits, layer=0), found)
    own = torch.tensor([[0, 1], [2, 3], [4, 5]])
    assert change.choose(found, own, 1) is own


def test_its_spread_is_the_one_declared(entry):
    rows = 5000
    change = entry("router_noise", sigma=0.3).change(row_keys(0, "test", 1, rows), torch.arange(rows))
    noise = change.logits(torch.zeros(rows, 8), 0)
    assert float(noise.std()) == pytest.approx(0.3, rel=0.02)
    assert abs(float(noise.mean())) < 4 * 0.3 / math.sqrt(8 * rows)


def test_a_decode_is_one_forward_with_the_same_noise(make_learner, draw):
    made = make_learner("router_noise", model="tiny_moe", **{"mismatch.router_noise.sigma": 1.0})
    drawn = draw(made)
    samples, first = drawn.samples, drawn.first
    rows, width = samples.tokens_BT.shape
    # The prompt is run once a group, with the key of the group's first row.
    row_BT = torch.arange(rows)[:, None].repeat(1, width)
    row_BT[:, :first] -= row_BT[:, :first] % 4
    key_N = row_keys(0, "router_noise rollout", 1, rows)[row_BT.reshape(-1)]
    model = clean_copy(made.parts.model)
    tap = RouterTap(model)
    noise = NoisyGates(1.0, key_N, samples.position_BT.reshape(-1))
    with torch.no_grad(), tap.changing(noise), tap.recording() as recorded:
        scored = token_logps(model, samples.tokens_BT, samples.position_BT, samples.mask_BT, temperature=1.0)
    torch.testing.assert_close(scored.logp_BT, samples.logp_behav_BT, rtol=0, atol=1e-5)
    routes = recorded.routes_LNK().view(2, rows, width, 2)
    known = samples.routes_LBTK >= 0
    assert torch.equal(samples.routes_LBTK[known], routes[known])
    plain = token_logps(model, samples.tokens_BT, samples.position_BT, samples.mask_BT, temperature=1.0)
    assert (plain.logp_BT - samples.logp_behav_BT).abs().max() > 1e-3


def test_flips_are_recorded_and_grow_with_it(make_learner):
    flips = []
    for sigma in (0.05, 2.0):
        made = make_learner("router_noise", model="tiny_moe", **{"mismatch.router_noise.sigma": sigma})
        flips.append(made.advance()[1]["expert_flip_frac"])
    assert 0 <= flips[0] < flips[1]
    assert flips[1] > 0.3


def test_options(entry, refused):
    assert entry("router_noise").needs_experts
    for sigma in (0.0, -1.0, math.nan, math.inf):
        refused("router_noise", "sigma", sigma=sigma)
