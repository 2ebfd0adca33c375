"""A head in another type: products by hand, the head alone, and ties to the embedding."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear


def test_products_by_hand(entry):
    # 1 + 2^-8 is 1 in bfloat16, and 256 + 1 is 256 there.
    hidden, weight = torch.tensor([[1 + 2**-8, 1.0]]), torch.tensor([[1.0, 0.0], [256.0, 1.0]])
    plain = linear(hidden, weight)
    assert plain.tolist() == [[1 + 2**-8, 258.0]]
    assert entry("lm_head").logits(hidden, weight, None, plain).tolist() == [[1.0, 256.0]]
    half = entry("lm_head", strength=0.5).logits(hidden, weight, None, plain)
    assert half.tolist() == [[1 + 2**-9, 257.0]]
    assert entry("lm_head", strength=0.0).logits(hidden, weight, None, plain) is plain
    biased = entry("lm_head").logits(hidden, weight, torch.tensor([1 + 2**-8, 0.0]), plain)
    assert biased.tolist() == [[2.0, 256.0]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_body_is_the_trainers_and_the_head_is_not(dtype, make_learner, draw, decoded, moved):
    made = make_learner("lm_head", **{"mismatch.lm_head.dtype": dtype})
    drawn, model, kind = draw(made), made.parts.model, getattr(torch, dtype)
    assert not moved(made)
    plain = decoded(model, drawn)
    head, own = model.lm_head, model.lm_head.forward
    head.forward = lambda hidden: linear(hidden.to(kind), head.weight.to(kind))
    by_hand = decoded(model, drawn)
    head.forward = own
    assert torch.equal(drawn.logp_BCV, by_hand)
    assert not torch.equal(plain, by_hand)


def test_float32_is_another_type_for_a_bfloat16_model_alone(make_learner, loaded):
    made = make_learner("lm_head", **{"mismatch.lm_head.dtype": "float32", "model.dtype": "bfloat16"})
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = made.parts.model.lm_head.weight
    assert torch.equal(loaded(made).lm_head(hidden), linear(hidden.float(), weight.float()))
    assert made.parts.model.lm_head(hidden).dtype == torch.bfloat16


def test_with_a_tied_embedding_the_head_alone_changes(make_learner, make_config, draw, moved):
    tied = make_config()["model"]["config"] | {"tie_word_embeddings": True}
    one, other = make_learner("lm_head", **{"model.config": tied}), make_learner(**{"model.config": tied})
    assert not moved(one)
    assert not torch.equal(draw(one).logp_BCV[:, 0], draw(other).logp_BCV[:, 0])


def test_options(refused):
    refused("lm_head", "dtype", dtype="float8")
