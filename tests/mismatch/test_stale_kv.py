"""A prefix cache of older weights: decodes by hand with caches filled by them, and what is marked."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from stalefront.model import clean_copy
from stalefront.policy import cache_argument

FRESH = {"delay": "none"}


@torch.no_grad()
def filled(model, prompt_BL):
    """Cache of all but the last token of every fourth row."""
    cache = DynamicCache(config=model.config)
    model(input_ids=prompt_BL[::4, :-1], use_cache=True, **{cache_argument(model): cache})
    return cache


@pytest.fixture
def history(stir):
    """`history(learner, steps)`: a copy of the weights before each step, the batch it trained on, and its record."""

    def run(learner, steps):
        models, batches, rows = [], [], []
        for step in range(steps):
            models.append(clean_copy(learner.parts.model))
            rows.append(learner.advance()[1])
            batches.append(learner.batch)
            stir(learner.parts.model, step)
        return models, batches, rows

    return run


def written(decode, model, batch, cache=None):
    """What a decode by hand would write down for the tokens of a batch."""
    first = int(batch.mask_BT.any(0).float().argmax())
    answer_BC = batch.tokens_BT[:, first:]
    logp = torch.log_softmax(decode(model, batch.tokens_BT[:, :first], answer_BC, 4, cache), -1)
    return logp.gather(-1, answer_BC[..., None]).squeeze(-1).where(batch.mask_BT[:, first:], 0.0), first


@pytest.mark.parametrize("pushes", [1, 2])
def test_log_probs_are_those_of_a_decode_on_an_older_cache(pushes, make_learner, decode, history):
    made = make_learner("stale_kv", **FRESH, **{"mismatch.stale_kv.pushes": pushes})
    models, batches, _ = history(made, 4)
    for step, (model, batch) in enumerate(zip(models, batches, strict=True)):
        first = int(batch.mask_BT.any(0).float().argmax())
        # Where so many pushes have not been, the cache is of the first weights; at the start there are no others.
        before = models[max(step - pushes, 0)]
        cache = filled(before, batch.tokens_BT[:, :first]) if step else None
        expected, _ = written(decode, model, batch, cache)
        torch.testing.assert_close(batch.logp_behav_BT[:, first:], expected, rtol=0, atol=1e-5)
        assert torch.equal(batch.kv_stale_BT, batch.mask_BT if step else torch.zeros_like(batch.mask_BT))
        if step:
            fresh, _ = written(decode, model, batch)
            assert (batch.logp_behav_BT[:, first:] - fresh).abs().max() > 1e-3


def test_half_of_it_is_half_way_between_the_two_caches(make_learner, decode, history):
    made = make_learner("stale_kv", **FRESH, **{"mismatch.stale_kv.strength": 0.5})
    models, batches, _ = history(made, 2)
    batch = batches[1]
    first = int(batch.mask_BT.any(0).float().argmax())
    old, new = (filled(model, batch.tokens_BT[:, :first]) for model in models)
    for mine, other in zip(new.layers, old.layers, strict=True):
        mine.keys, mine.values = (mine.keys + other.keys) / 2, (mine.values + other.values) / 2
    expected, _ = written(decode, models[1], batch, new)
    torch.testing.assert_close(batch.logp_behav_BT[:, first:], expected, rtol=0, atol=1e-5)


def test_nothing_is_stale_before_weights_have_moved(make_learner):
    rows = [make_learner(*mismatch, **FRESH).advance()[1] for mismatch in (["stale_kv"], [])]
    assert rows[0]["kv_stale_frac"] == 0.0
    assert rows[0]["old_mu_k3_nats"] == rows[1]["old_mu_k3_nats"]


def test_a_push_is_a_batch_and_not_an_update(make_learner, decode, history):
    made = make_learner("stale_kv", **{"delay": "reuse", "delay.S": 2})
    models, batches, _ = history(made, 4)
    batch = batches[2]
    assert batch.index == 2
    first = int(batch.mask_BT.any(0).float().argmax())
    expected, _ = written(decode, models[2], batch, filled(models[0], batch.tokens_BT[:, :first]))
    torch.testing.assert_close(batch.logp_behav_BT[:, first:], expected, rtol=0, atol=1e-5)


def test_the_difference_lies_between_sampler_and_trainer(make_learner, history):
    made = make_learner("stale_kv", **FRESH)
    _, _, rows = history(made, 2)
    assert [row["kv_stale_frac"] for row in rows] == [0.0, 1.0]
    assert rows[1]["mismatch_k3_nats"] > 1e-6 > rows[0]["mismatch_k3_nats"]
    assert rows[1]["theta_old_ratio_max"] == 1.0


def test_routes_of_a_cache_from_before_are_not_known(make_learner, history):
    made = make_learner("stale_kv", model="tiny_moe", **FRESH)
    _, batches, _ = history(made, 2)
    first = int(batches[1].mask_BT.any(0).float().argmax())
    assert (batches[0].routes_LBTK[:, :, : first - 1] >= 0).all()
    assert (batches[1].routes_LBTK[:, :, : first - 1] == -1).all()
    assert (batches[1].routes_LBTK[:, :, first - 1] >= 0).all()


def test_options(refused):
    refused("stale_kv", "pushes", pushes=0)
