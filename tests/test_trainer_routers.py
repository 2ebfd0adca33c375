"""Taps of the modules that the trainer runs: what is recorded, what is replayed, and what the columns count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stalefront.build import build
from stalefront.cell import Cell
from stalefront.loop import Learner
from stalefront.policy import forward
from stalefront.routing import RoutingError, flips_LBT
from stalefront.trainer_routers import TrainerRouters


@pytest.fixture(scope="module")
def make_learner(make_config, cache_dir):
    """`make_learner(…)`: of a mixture of experts without warm-up, with routers that are far from ties."""

    def make(**overrides):
        small = {"model": "tiny_moe", "model.warmup": None, "task.num_prompts": 2, "task.num_generations": 3}
        config = make_config(**small | overrides)
        config["model"]["config"] |= {"initializer_range": 0.3}
        cell = Cell.from_config(config)
        return Learner(cell, build(cell, cache_dir))

    return make


@pytest.fixture(scope="module")
def plain(make_learner):
    return make_learner()


@pytest.fixture(scope="module")
def batch(plain):
    return plain.source.take(0)


def run(model, batch):
    with torch.no_grad():
        return forward(model, batch.tokens_BT, batch.position_BT).logits


def test_without_routes_the_own_ones_are_recorded(plain, batch):
    routers, model = TrainerRouters(True), plain.parts.model
    with routers.around(model, batch, None) as seen:
        run(model, batch)
    assert seen.own_LBTK.shape == batch.own_routes_LBTK.shape
    real = batch.real_BT
    assert torch.equal(seen.own_LBTK[:, real], batch.own_routes_LBTK[:, real])
    # A second forward is another one.
    with routers.around(plain.parts.reference, batch, None) as other:
        run(plain.parts.reference, batch)
    assert torch.equal(other.own_LBTK, seen.own_LBTK)
    assert len(routers._taps) == 2


def test_with_routes_those_are_taken_and_the_own_ones_known(plain, batch):
    routers, model = TrainerRouters(True), plain.parts.model
    forced = (batch.own_routes_LBTK + 1).remainder(8).where(batch.own_routes_LBTK >= 0, -1)
    before = run(model, batch)
    with routers.around(model, batch, forced) as seen:
        after = run(model, batch)
    assert not torch.allclose(before, after, atol=1e-2)
    real = batch.real_BT
    # The first layer sees what it saw, and would choose as it did.
    assert torch.equal(seen.own_LBTK[0][real], batch.own_routes_LBTK[0][real])
    assert flips_LBT(seen.own_LBTK, batch.own_routes_LBTK)[1].any()
    assert torch.equal(run(model, batch), before)


def test_routes_that_do_not_fit_are_refused(plain, batch):
    routers, model = TrainerRouters(True), plain.parts.model
    with pytest.raises(RoutingError, match="meets routes of"), routers.around(model, batch, batch.routes_LBTK[:, 1:]):
        run(model, batch)
    with pytest.raises(RoutingError, match="no router ran"), routers.around(model, batch, batch.routes_LBTK):
        pass


def test_a_model_whose_routers_are_not_looked_at_is_let_alone(plain, batch):
    routers = TrainerRouters(False)
    with routers.around(plain.parts.model, batch, None) as seen:
        run(plain.parts.model, batch)
    assert routers._taps == {}
    with pytest.raises(AssertionError, match="not looked at"):
        _ = seen.own_LBTK


def test_drift_by_hand(make_learner):
    """Of 3 sequences some decisions are changed on record, so that θ's own choices differ from just those."""
    learner = make_learner(**{"delay.S": 2})
    learner.batch = learner.source.take(0)
    known, mask = learner.batch.own_routes_LBTK.clone(), learner.batch.mask_BT
    rows, places = mask.nonzero(as_tuple=True)
    known[0, rows[:2], places[:2]] = (known[0, rows[:2], places[:2]] + 1).remainder(8)
    known[1, rows[2], places[2]] = known[1, rows[2], places[2]].flip(-1)
    known[1, rows[3], places[3]] = -1
    # Off the mask nothing counts.
    known[0, 0, 0] = (known[0, 0, 0] + 1).remainder(8)
    learner.batch = replace(learner.batch, own_routes_LBTK=known)
    learner.routers.start(1)
    learner._backward(learner.batch, learner._advantages(learner.batch.reward_B))
    flips = int(flips_LBT(known, learner.batch.routes_LBTK)[0, rows[:2], places[:2]].sum())
    found = learner.routers.columns()
    assert flips == 2
    assert found == {"route_drift_frac": pytest.approx(2 / (2 * int(mask.sum()) - 1)), "replay_gap_k3_nats": None}


def test_counts_begin_anew_with_every_step(make_learner):
    learner = make_learner(replay="r3", mismatch=["expert_flips"], **{"replay.probe_every": 2, "delay.S": 2})
    learner.routers.start(1)
    assert learner.routers._probes
    learner.batch = learner.source.take(0)
    learner._backward(learner.batch, learner._advantages(learner.batch.reward_B))
    assert learner.routers._sums.min() > 0
    learner.routers.start(2)
    assert not learner.routers._probes
    assert learner.routers._sums.tolist() == [0.0] * 4


def test_a_module_that_theta_is_compared_with_takes_the_same_routes(make_learner):
    replayed = make_learner(replay="r3", mismatch=["expert_flips"])
    batch = replayed.source.take(0)
    other = replayed.parts.reference
    with replayed.routers.like_theta(other, batch):
        forced = run(other, batch)
    with TrainerRouters(True).around(other, batch, batch.routes_LBTK):
        assert torch.equal(run(other, batch), forced)
    assert not torch.equal(run(other, batch), forced)
    free = make_learner()
    with free.routers.like_theta(free.parts.reference, batch):
        assert torch.equal(run(free.parts.reference, batch), run(other, batch))
    assert free.routers.routers._taps == {}
