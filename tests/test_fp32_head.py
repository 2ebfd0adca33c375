"""A language-model head in float32: what it computes, who has it, and that training goes on as before."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from stalefront.build import build
from stalefront.loop import Learner
from stalefront.setup import trainer_copy

BF16 = {"model.dtype": "bfloat16", "model.warmup": None, "loss.beta": 0.04}
DECAY = {"optimizer.warmup_steps": 0, "optimizer.weight_decay": 0.5, "optimizer.lr": 0.02}
TOKENS = torch.randint(2, 16, (3, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def learner(make_cell, cache_dir):
    """`learner(head, …)`: of a bfloat16 cell."""

    def make(head, **overrides):
        cell = make_cell(**BF16 | {"model.fp32_head": head} | overrides)
        return Learner(cell, build(cell, cache_dir))

    return make


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


@torch.no_grad()
def by_hand(model):
    """Logits of the body's own hidden states, multiplied in float32 and in the parameters' type."""
    hidden, weight = model.model(input_ids=TOKENS).last_hidden_state, model.lm_head.weight
    return linear(hidden.float(), weight.float()), linear(hidden, weight)


@pytest.mark.parametrize("tied", [False, True])
def test_who_computes_its_head_in_float32(tied, learner):
    tie = {"model.config.tie_word_embeddings": tied}
    modules = {}
    for head in ("none", "trainer", "both"):
        it = learner(head, **tie)
        model = it.parts.model
        modules[head] = {"trainer": model, "sampler": it.source.inference.load(model).plain}
    for head, float32 in (("none", ()), ("trainer", ("trainer",)), ("both", ("trainer", "sampler"))):
        for name, module in modules[head].items():
            wide, narrow = by_hand(module)
            assert torch.equal(logits(module), wide if name in float32 else narrow), (head, name)
            assert logits(module).dtype == (torch.float32 if name in float32 else torch.bfloat16)
            assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["reference", "kept versions", "average"])
def test_copies_are_dressed_alike(name, learner):
    it = learner("trainer", proximal="ema", delay="lag", **{"delay.via": "weights"})
    copies = {"reference": it.parts.reference, "kept versions": it.source.store.module, "average": it.average.module}
    assert torch.equal(logits(copies[name]), logits(it.parts.model))
    assert logits(copies[name]).dtype == torch.float32
    plain = learner("none")
    assert logits(trainer_copy(plain.parts.model, plain.cell.model)).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["trainer", "both"])
def test_a_step_trains_the_very_parameters(tied, head, learner):
    it = learner(head, **{"model.config.tie_word_embeddings": tied, "delay.S": 2}, **DECAY)
    parts = it.parts
    names = list(parts.model.state_dict())
    before = logits(parts.model)
    row = [it.advance()[1] for _ in range(3)][-1]
    assert row["dist_from_start"] > 0.1
    assert list(parts.model.state_dict()) == names
    # By the new weights, in float32 still; the reference stays.
    assert torch.equal(logits(parts.model), by_hand(parts.model)[0])
    assert not torch.equal(logits(parts.model), before)
    assert torch.equal(logits(parts.reference), before)
    assert (parts.model.get_input_embeddings().weight is parts.model.lm_head.weight) == tied
    sampler = it.source.inference.load(parts.model).plain
    assert torch.equal(logits(sampler), by_hand(parts.model)[0 if head == "both" else 1])


def test_gradients_come_in_the_type_of_the_parameters(learner):
    it = learner("trainer")
    model = it.parts.model
    model(input_ids=TOKENS).logits.logsumexp(-1).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    weight = model.lm_head.weight
    with torch.no_grad():
        hidden = model.model(input_ids=TOKENS).last_hidden_state.float().reshape(-1, 32)
        probability = torch.softmax(linear(hidden, weight.float()), -1)
    # ∂ log Σ eˡ / ∂W = Σ p hᵀ
    assert torch.allclose(weight.grad.float(), probability.T @ hidden, rtol=1e-2, atol=1e-2)


def test_on_the_trainer_alone_it_is_a_mismatch(learner):
    """What is left on both sides is that of a cached decode in bfloat16."""
    mismatch = {head: learner(head).advance()[1]["mismatch_logratio_abs_mean"] for head in ("trainer", "both")}
    assert mismatch["trainer"] > mismatch["both"] > 0
