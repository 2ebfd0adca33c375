"""Where batches come from: kept versions of the weights, and columns that only some rules need."""

import pytest
import torch

from stalefront.build import build
from stalefront.loop import Learner
from stalefront.model import clean_copy
from stalefront.source import VersionStore, pack, unpack

WARM = {"model.warmup.steps": 20}


@pytest.fixture
def model(make_cell):
    options = make_cell(**{"model.config.tie_word_embeddings": True}).model
    return options.build(options.tokenizer(), seed=0)


def test_versions_are_dropped_before_the_next_is_made_and_tied_weights_are_one(model, monkeypatch):
    store = VersionStore(model, 2, clean_copy(model))
    held = []
    clones = "stalefront.source._clones"
    monkeypatch.setattr(clones, _noting(held, store))
    for version in range(5):
        with torch.no_grad():
            next(model.parameters()).fill_(float(version))
        store.publish(version)
    assert held == [0, 1, 2, 2, 2]
    assert sorted(store.states) == [2, 3, 4]
    for version, state in store.states.items():
        assert state.keys() == model.state_dict().keys()
        assert float(next(iter(state.values())).mean()) == version
        tied = [state[name] for name in ("model.embed_tokens.weight", "lm_head.weight")]
        assert tied[0] is tied[1]
        assert len({id(value) for value in state.values()}) == len(list(model.parameters()))
    older = store.at(3, 4)
    assert older is store.module
    assert torch.equal(older.get_input_embeddings().weight, torch.full_like(older.get_input_embeddings().weight, 3.0))


def _noting(held, store):
    from stalefront.source import _clones

    def clones(state):
        held.append(len(store.states))
        return _clones(state)

    return clones


def test_a_version_that_is_there_is_not_made_again(model):
    store = VersionStore(model, 1, clean_copy(model))
    store.publish(0)
    first = store.states[0]
    store.publish(0)
    assert store.states[0] is first


def test_entropies_of_the_sampler_are_recorded(make_cell, cache_dir):
    cell = make_cell(**WARM, correction=["estr"], **{"optimizer.grad_accum": 2})
    entropic = Learner(cell, build(cell, cache_dir))
    batch = entropic.source.take(0)
    entropy = batch.entropy_behav_BT
    assert entropy.dtype == torch.float32
    assert (entropy[~batch.mask_BT] == 0).all()
    assert (entropy[batch.mask_BT] > 0).all()
    # On the first step the present policy is the sampling one.
    seen = entropic._backward(batch, entropic._advantages(batch.reward_B))
    assert torch.equal(torch.cat([piece.entropy_BT for piece in seen]), entropy)
    assert torch.equal(torch.cat([piece.inputs.entropy_behav_BT for piece in seen]), entropy)
    again = unpack(pack(batch))
    assert torch.equal(again.entropy_behav_BT, entropy)
    picked = batch.rows(torch.tensor([3, 1]))
    assert torch.equal(picked.entropy_behav_BT, entropy[[3, 1]])
    # A batch in a checkpoint from before there was such a column.
    older = pack(batch)
    del older["entropy_behav_BT"]
    assert unpack(older).entropy_behav_BT is None


def test_lags_rewards_and_groups_reach_the_rules(make_cell, cache_dir):
    cell = make_cell(**WARM, **{"optimizer.grad_accum": 2})
    learner = Learner(cell, build(cell, cache_dir))
    for step in range(3):
        learner.advance()
        assert learner.version == step + 1
    seen = learner._backward(learner.batch, learner._advantages(learner.batch.reward_B))
    mask, lag = (torch.cat([getattr(piece.inputs, name) for piece in seen]) for name in ("mask_BT", "lag_BT"))
    assert torch.equal(lag, 3 * mask.long())
    assert torch.equal(torch.cat([piece.inputs.reward_B for piece in seen]), learner.batch.reward_B)
    assert torch.equal(torch.cat([piece.inputs.group_B for piece in seen]), torch.arange(64) // 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["tiny", "tiny_moe"])
def test_a_kept_version_computes_what_the_live_model_does(name, dtype, make_cell):
    """To the last bit, rotary frequencies included, which no state dict holds."""
    options = make_cell(model=name, **{"model.dtype": dtype}).model
    model = options.build(options.tokenizer(), seed=0)
    store = VersionStore(model, 1, clean_copy(model))
    store.publish(3)
    older = store.at(3, 4)
    tokens = torch.randint(16, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(older(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert older is not model
    assert [p.dtype for p in older.parameters()] == [p.dtype for p in model.parameters()]
    assert [b.dtype for b in older.buffers()] == [b.dtype for b in model.buffers()]
    assert all(p.requires_grad for p in older.parameters())
    assert not {p.data_ptr() for p in older.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert not {b.data_ptr() for b in older.buffers()} & {b.data_ptr() for b in model.buffers()}


def test_the_version_that_filled_a_cache(model):
    store = VersionStore(model, keep=6, module=clean_copy(model))
    for version in (0, 2, 4, 6):
        store.publish(version)
    assert [store.pushed_before(6, pushes) for pushes in (1, 2, 3, 9)] == [4, 2, 0, 0]
    assert store.pushed_before(2, 2) == 0
    assert store.pushed_before(0, 1) is None
