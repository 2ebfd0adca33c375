"""Without replay: what is recorded at rollout are the trainer's own routes, and replaying those changes nothing."""

from __future__ import annotations

import json

import pytest
import torch

from stalefront.build import build
from stalefront.choice import OptionError
from stalefront.loop import Learner
from stalefront.record import WALL_CLOCK
from stalefront.routers import RoutingError
from stalefront.routing import find_routers
from stalefront.sampler_stats import fed_BT

REPLAY_COLUMNS = {"route_drift_frac", "replay_gap_k3_nats"}
ADDITIONS = {
    **{"task": "additions", "task.path": "builtin:additions.jsonl"},
    **{"task.reward_function": "first_line", "model.alphabet": "0123456789_>+=\n ", "model.config.vocab_size": 18},
    **{"model.config.max_position_embeddings": 128, "task.temperature": 3.0},
}


def routes_alone(model, batch, row):
    """Sets of experts of the fed tokens of one row, which runs by itself and without padding: layer → list of sets."""
    tokens = batch.tokens_BT[row][fed_BT(batch)[row]]
    found = []
    hooks = [
        router.register_forward_hook(lambda _module, _inputs, out: found.append(out[2]))
        for router in find_routers(model)
    ]
    with torch.no_grad():
        model(input_ids=tokens[None])
    for hook in hooks:
        hook.remove()
    return [[set(experts) for experts in layer.tolist()] for layer in found]


@pytest.mark.parametrize(
    "overrides", [{}, {"optimizer.grad_accum": 4}, ADDITIONS], ids=["short", "slices", "additions"]
)
def test_recorded_routes_are_the_trainers_own(overrides, routed_learner):
    learner = routed_learner(**overrides)
    batch = learner.source.take(0)
    routes, fed = batch.routes_LBTK, fed_BT(batch)
    assert len(set((batch.position_BT >= 0).sum(-1).tolist())) > 1
    assert len(set(batch.mask_BT.sum(-1).tolist())) > 1
    assert routes.dtype == torch.int16
    assert (routes[:, fed] >= 0).all()
    assert (routes[:, ~fed] == -1).all()
    own = batch.own_routes_LBTK
    assert torch.equal(own[:, fed].sort(-1).values, routes[:, fed].sort(-1).values)
    assert torch.equal((own >= 0).all(-1)[0], batch.real_BT)
    for row in range(0, len(fed), 3):
        expected = routes_alone(learner.parts.model, batch, row)
        assert [[set(e) for e in layer.tolist()] for layer in routes[:, row, fed[row]]] == expected


def test_at_lag_0_no_replay_changes_any_number(routed_cell, completed):
    rows = {}
    for replay in ("none", "r2", "r3"):
        cell = routed_cell(replay=replay, delay="none", **{"optimizer.grad_accum": 2})
        rows[replay] = [
            json.dumps({k: v for k, v in row.items() if k not in WALL_CLOCK | REPLAY_COLUMNS})
            for row in completed(cell)
        ]
    assert rows["none"] == rows["r2"] == rows["r3"]
    assert json.loads(rows["none"][-1])["dist_from_start"] > 0.1


def test_drift_is_counted_against_the_sampling_weights(routed_cell, completed):
    rows = completed(routed_cell(**{"delay.S": 3}))[1:]
    drift = [row["route_drift_frac"] for row in rows]
    assert drift[0] == drift[3] == 0
    assert 0 < drift[1] < drift[2] < 0.5
    assert {row["replay_gap_k3_nats"] for row in rows} == {None}
    assert {row["expert_flip_frac"] for row in rows} == {0.0}


def test_a_dense_model_has_no_such_columns(make_cell, completed):
    row = completed(make_cell(steps=1, **{"model.warmup": None}))[-1]
    names = ("route_drift_frac", "replay_gap_k3_nats", "expert_flip_frac", "route_fallback_frac")
    assert [row[name] for name in names] == [None] * 4


DENSE = {"model": "tiny"}
PHIMOE = {"model.config.model_type": "phimoe"}


@pytest.mark.parametrize("model", [DENSE, PHIMOE], ids=["dense", "phimoe"])
@pytest.mark.parametrize(
    "overrides",
    [
        *({"replay": name} for name in ("r2", "r3")),
        *({"mismatch": [name]} for name in ("expert_flips", "router_noise", "router_ties")),
        {"model.deterministic_topk": True},
    ],
    ids=str,
)
def test_a_model_without_routers_that_are_understood_is_refused(model, overrides, routed_cell, cache_dir):
    cell = routed_cell(**model, **overrides)
    name = cell.model.config["model_type"]
    with pytest.raises(RoutingError, match=f"model_type '{name}' cannot be recorded or replayed"):
        Learner(cell, build(cell, cache_dir))


def test_and_runs_where_its_routers_are_let_alone(routed_learner):
    learner = routed_learner(**PHIMOE)
    row = learner.advance()[1]
    assert row["loss"] == pytest.approx(0, abs=1e-6)
    assert "route_drift_frac" not in row


@pytest.mark.parametrize(("replay", "every"), [("none", 4), ("none", -1), ("r2", -1), ("r3", -1)])
def test_probes_that_mean_nothing_are_refused(replay, every, make_cell):
    with pytest.raises(OptionError) as caught:
        make_cell(model="tiny_moe", replay=replay, **{"replay.probe_every": every})
    assert caught.value.field == "replay.probe_every"
