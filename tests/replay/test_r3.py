"""R3: old and θ take the sampler's experts, in a forward and in its backward; nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stalefront.batch import BatchError
from stalefront.evaluate import validate
from stalefront.policy import token_logps
from stalefront.routing import RouterTap, flips_LBT
from stalefront.sampler_stats import fed_BT
from stalefront.stats import step_columns

FLIPS = {"mismatch": ["expert_flips"], "mismatch.expert_flips.rate": 0.3}
STALE = {"delay.S": 4}


def scored(model, piece, routes=None):
    """log-probs of a piece's tokens by the module itself, under `routes` or by its own choices."""
    inputs = (piece.tokens_BT, piece.position_BT, piece.mask_BT)
    with torch.no_grad():
        if routes is None:
            return token_logps(model, *inputs, temperature=1.0).logp_BT
        with RouterTap(model).replaying(routes):
            return token_logps(model, *inputs, temperature=1.0).logp_BT


def stepped(learner, steps):
    """The learner after `steps` steps, and the records of those."""
    return [learner.advance()[1] for _ in range(steps)]


def theta_of(learner):
    """Log-probs that a learner step would start from, over all micro-batches."""
    seen = learner._backward(learner.batch, learner._advantages(learner.batch.reward_B))
    return torch.cat([piece.inputs.logp_theta_BT for piece in seen])


@pytest.mark.parametrize("split", [{}, {"optimizer.grad_accum": 2}])
def test_flips_are_gone_from_old_over_mu(split, routed_cell, completed):
    rows = {
        name: completed(routed_cell(replay=name, steps=4, **FLIPS, **STALE, **split))[1:]
        for name in ("none", "r2", "r3")
    }
    for name, found in rows.items():
        assert 0.2 < found[0]["expert_flip_frac"] < 0.4
        for row in found:
            assert row["decomposition_error_nats"] < 1e-5
            assert (row["old_mu_k3_nats"] < 1e-11) == (name == "r3"), name
            assert row["mismatch_k3_nats"] == row["old_mu_k3_nats"]
    assert rows["none"][0]["old_mu_k3_nats"] > 1e-3
    assert rows["none"][0]["old_mu_k3_nats"] == rows["r2"][0]["old_mu_k3_nats"]
    assert all(found[0]["theta_old_ratio_max"] == 1 for found in rows.values())


def test_old_and_theta_take_the_recorded_routes_and_nothing_else_does(routed_learner):
    learner = routed_learner(replay="r3", **FLIPS, **STALE)
    stepped(learner, 3)
    parts, batch = learner.parts, learner.batch
    clean = routed_learner().parts.model
    routes = batch.routes_LBTK
    assert torch.equal(batch.logp_old_BT, scored(clean, batch, routes))
    assert torch.equal(theta_of(learner), scored(parts.model, batch, routes))
    assert (scored(parts.model, batch, routes) - scored(parts.model, batch)).abs().max() > 1e-2
    assert torch.equal(batch.logp_ref_BT, scored(clean, batch))
    # Validation samples with the routers' own choices: a learner without replay validates alike.
    other = routed_learner()
    other.parts.model.load_state_dict(parts.model.state_dict())
    assert validate(learner.cell, parts, 3) == validate(other.cell, other.parts, 3)


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_an_average_that_stands_as_old_takes_the_routes_of_theta(replay, routed_learner):
    """With decay 0 it is θ itself, so that θ/old is 1 exactly where both take the same experts."""
    learner = routed_learner(replay=replay, proximal="ema", **{"proximal.decay": 0.0}, **FLIPS, **STALE)
    rows = stepped(learner, 3)
    assert rows[-1]["route_drift_frac"] > 0
    assert [row["theta_old_ratio_max"] for row in rows] == [1.0, 1.0, 1.0]
    assert rows[-1]["lag_var_share"] > 0


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_the_gradient_is_that_of_the_replayed_loss(replay, routed_learner):
    learner = routed_learner(replay=replay, loss="reinforce", **FLIPS, **STALE, **{"task.num_prompts": 8})
    learner.batch = learner.source.take(0)
    advantages = learner._advantages(learner.batch.reward_B)
    parameters = list(learner.parts.model.parameters())
    learner._backward(learner.batch, advantages)
    gradient = [p.grad.clone() for p in parameters]
    length = float(torch.cat([g.reshape(-1) for g in gradient]).norm())
    start = [p.detach().clone() for p in parameters]

    def loss_at(offset):
        with torch.no_grad():
            for p, origin, g in zip(parameters, start, gradient, strict=True):
                p.copy_(origin + offset / length * g)
        return step_columns(learner._backward(learner.batch, advantages))["loss"]

    # Without replay routers cross ties on such a way, and the slope is off by a quarter.
    offset = 2e-3
    slope = (loss_at(offset) - loss_at(-offset)) / (2 * offset)
    assert length > 0.1
    assert slope == pytest.approx(length, rel=5e-3)


@pytest.mark.parametrize("replay", ["none", "r2", "r3"])
def test_a_step_with_gradient_checkpointing_is_the_same(replay, routed_learner):
    found = []
    for checkpointed in (False, True):
        learner = routed_learner(replay=replay, **FLIPS, **STALE, **{"replay.probe_every": 0})
        stepped(learner, 1)
        model = learner.parts.model
        if checkpointed:
            model.activation_checkpointing_enable()
            model.train()
        runs = []
        hook = model.model.layers[0].mlp.gate.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        seen = learner._backward(learner.batch, learner._advantages(learner.batch.reward_B))
        hook.remove()
        assert len(runs) == 1 + checkpointed
        drift = learner.routers.columns()["route_drift_frac"]
        found.append((step_columns(seen), drift, [p.grad.clone() for p in model.parameters()]))
    (columns, drift, gradient), (again, drift_again, other) = found
    assert columns == pytest.approx(again, abs=1e-6, nan_ok=True)
    assert drift == drift_again > 0
    for one, two in zip(gradient, other, strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def test_routes_of_other_tokens_are_refused(routed_learner):
    learner = routed_learner(replay="r3", delay="lag", **{"delay.lag_updates": 1})
    learner.advance()
    batch = learner.source.queue[0]
    order = torch.arange(len(batch.tokens_BT)).roll(1)
    assert batch.rows(order).check(1).index == batch.index
    learner.source.queue[0] = replace(batch, tokens_BT=batch.tokens_BT[order])
    with pytest.raises(BatchError, match=r"the routes of [0-9]+ sequences were recorded on other tokens"):
        learner.advance()


def test_a_route_that_is_not_handed_over_is_the_trainers_own_choice(routed_learner):
    learner = routed_learner(replay="r3", mismatch=["stale_kv"], **{"delay.S": 2})
    first = stepped(learner, 2)[0]
    assert first["route_fallback_frac"] == first["kv_stale_frac"] == 0
    row = stepped(learner, 1)[0]
    batch = learner.batch
    fed, known = fed_BT(batch), (batch.routes_LBTK[0] >= 0).all(-1)
    prompt = int(batch.mask_BT.any(0).float().argmax())
    # Of a prompt the last token alone went through the new weights.
    assert not known[:, : prompt - 1].any()
    assert known[:, prompt - 1].all()
    unknown = int(fed[:, : prompt - 1].sum())
    assert row["route_fallback_frac"] == unknown / int(fed.sum())
    assert row["kv_stale_frac"] == 1
    assert not flips_LBT(batch.routes_LBTK, batch.own_routes_LBTK)[:, ~known].any()
    nothing = torch.full_like(batch.routes_LBTK, -1)
    model = learner.parts.model
    assert torch.equal(scored(model, batch, nothing), scored(model, batch))


@pytest.mark.parametrize(
    "overrides",
    [
        {"delay.S": 4, "delay.minibatches": 2, "optimizer.grad_accum": 2},
        {"delay": "lag", "delay.lag_updates": 2, "delay.via": "weights"},
        {"delay": "lag", "delay.lag_updates": 2, "delay.via": "data"},
    ],
    ids=["minibatches", "weights", "data"],
)
def test_every_delay_hands_routes_to_their_tokens(overrides, routed_learner):
    learner = routed_learner(replay="r3", **FLIPS, **overrides)
    rows = stepped(learner, 6)
    for row in rows:
        assert row["old_mu_k3_nats"] < 1e-11
        assert row["route_fallback_frac"] == 0
        assert row["route_drift_frac"] > 0.1
        assert row["expert_flip_frac"] > 0.1
    assert rows[-1]["lag_max_updates"] > 0
    assert rows[-1]["theta_old_k3_nats"] > 1e-6


def test_late_weights_and_late_data_are_one_run(routed_cell, completed, numbers):
    lag = {"replay": "r3", "delay": "lag", "delay.lag_updates": 2, **FLIPS}
    late = [completed(routed_cell(**lag, **{"delay.via": via})) for via in ("weights", "data")]
    where_it_waits = ("lag_wait_mean_updates", "lag_gen_mean_updates")
    weights, data = ([{k: v for k, v in row.items() if k not in where_it_waits} for row in rows] for rows in late)
    assert numbers(weights) == numbers(data)


def test_the_gap_of_replay_is_measured_when_due(routed_learner):
    every = {"replay.probe_every": 3, **STALE}
    calm, flipped = (routed_learner(replay="r3", **every, **mismatch) for mismatch in ({}, FLIPS))
    gaps = [[row["replay_gap_k3_nats"] for row in stepped(learner, 5)] for learner in (calm, flipped)]
    for found in gaps:
        assert [gap is None for gap in found] == [False, True, True, False, True]
    # At lag 0 without flips the replayed routes are the own ones.
    assert gaps[0][0] == pytest.approx(0, abs=1e-12)
    assert gaps[1][0] > 1e-3
    assert gaps[1][3] > 1e-3
    never = routed_learner(replay="r3", **FLIPS, **STALE, **{"replay.probe_every": 0})
    assert [row["replay_gap_k3_nats"] for row in stepped(never, 2)] == [None, None]


def test_the_gap_by_hand(routed_learner):
    learner = routed_learner(replay="r3", **FLIPS, **STALE, **{"replay.probe_every": 3, "optimizer.grad_accum": 2})
    stepped(learner, 3)
    model, batch = learner.parts.model, learner.batch
    difference = (scored(model, batch) - scored(model, batch, batch.routes_LBTK))[batch.mask_BT].double()
    expected = float((difference.exp() - 1 - difference).mean())
    (row,) = stepped(learner, 1)
    assert row["replay_gap_k3_nats"] == pytest.approx(expected, rel=1e-4)


def test_gone_weights_are_recorded_under_replay(routed_cell, run_in, tmp_path):
    cell = routed_cell(replay="r3", optimizer="sgd", **FLIPS, **STALE, **{"optimizer.lr": 1e38, "steps": 20})
    ran = run_in(tmp_path, cell)
    assert ran.outcome["state"] == "non-finite", ran.outcome["error"]
