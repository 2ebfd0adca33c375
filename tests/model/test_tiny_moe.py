"""The preset `tiny_moe`: a mixture of experts that is understood, learns, and breaks ties where it is told to."""

from __future__ import annotations

import pytest
import torch

from stalefront.build import build
from stalefront.loop import Learner
from stalefront.policy import forward, token_logps
from stalefront.routing import RouterTap, find_routers, route_bytes_per_token

MOE = {"model": "tiny_moe", "model.warmup": None, "task.num_prompts": 2, "task.num_generations": 4}


@pytest.fixture
def learner(make_cell, cache_dir):
    """`learner(…)`: of the preset without warm-up."""

    def make(**overrides):
        cell = make_cell(**MOE | overrides)
        return Learner(cell, build(cell, cache_dir))

    return make


def test_its_routers_are_found(learner):
    it = learner()
    model = it.parts.model
    tap = RouterTap(model)
    assert (tap.layers, tap.experts, tap.top_k) == (2, 8, 2)
    assert [type(router).__name__ for router in find_routers(model)] == ["Qwen3MoeTopKRouter"] * 2
    assert it.parts.routed
    assert route_bytes_per_token(tap.layers, tap.top_k) == 8
    assert sum(p.numel() for p in model.parameters()) == 59_072


def test_it_learns_the_task(make_cell, completed):
    options = {"model.warmup.steps": 200, "model.warmup.batch_size": 64, "steps": 2}
    rows = completed(make_cell(model="tiny_moe", **options))
    assert rows[0]["reward_val"] > 0
    assert rows[-1]["route_drift_frac"] is not None
    assert rows[-1]["route_fallback_frac"] == 0


def tie(model):
    """Make all experts of every layer score alike on every token."""
    with torch.no_grad():
        for router in find_routers(model):
            router.weight.zero_()


@pytest.mark.parametrize("overrides", [{}, {"mismatch": ["int8"]}, {"mismatch": ["bf16"]}], ids=str)
def test_ties_go_to_the_lowest_indices_in_trainer_and_sampler(overrides, learner):
    it = learner(**{"model.deterministic_topk": True, "delay": "lag", "delay.via": "weights"}, **overrides)
    parts, source = it.parts, it.source
    tie(parts.model)
    batch = source.take(0)
    for routes in (batch.routes_LBTK, batch.own_routes_LBTK):
        known = (routes >= 0).all(-1)
        assert known.any()
        assert (routes[known] == torch.tensor([0, 1], dtype=torch.int16)).all()
    # Copies that compute as the trainer does choose alike.
    for copy in (parts.reference, source.store.module):
        tie(copy)
        with torch.no_grad(), RouterTap(copy).recording() as recorded:
            forward(copy, batch.tokens_BT, batch.position_BT)
        assert (recorded.routes_LNK() == torch.tensor([0, 1], dtype=torch.int16)).all()


def test_ties_between_some_experts(learner):
    it = learner(**{"model.deterministic_topk": True})
    router = find_routers(it.parts.model)[0]
    with torch.no_grad():
        router.weight.zero_()
        router.weight[[5, 2, 6], 0] = 1.0
        up, down = torch.zeros(1, 32), torch.zeros(1, 32)
        up[0, 0], down[0, 0] = 3.0, -3.0
        # Upwards three experts tie for two places; downwards the five others do.
        assert router(up)[2].tolist() == [[2, 5]]
        assert router(down)[2].tolist() == [[0, 1]]


def test_without_ties_a_deterministic_choice_changes_no_number(make_cell, completed, numbers):
    options = {**MOE, "steps": 3, "mismatch": ["expert_flips"], "delay.S": 2}
    plain = completed(make_cell(**options))
    stable = completed(make_cell(**options, **{"model.deterministic_topk": True}))
    assert numbers(plain) == numbers(stable)


def test_gradients_flow_through_a_stable_choice(learner):
    found = []
    for stable in (False, True):
        it = learner(**{"model.deterministic_topk": stable})
        batch = it.source.take(0)
        inputs = (batch.tokens_BT, batch.position_BT, batch.mask_BT)
        token_logps(it.parts.model, *inputs, temperature=1.0).logp_BT.sum().backward()
        found.append([p.grad for p in it.parts.model.parameters()])
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(*found, strict=True))
    assert all(g.abs().max() > 0 for g in found[1])
