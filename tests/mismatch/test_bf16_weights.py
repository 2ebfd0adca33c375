"""Weights in bfloat16, computed in the model's type: which ones, and what the decode makes of them."""

from __future__ import annotations

import torch

from stalefront.model import clean_copy
from stalefront.setup import trainer_copy

NORMS = ("norm.weight", "layernorm.weight")


def test_values_by_hand(entry):
    weight = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -3.0]])
    # Ties go to the even neighbour: 1 for the first and 1 + 2^-6 for the second.
    assert entry("bf16_weights").weight(weight).tolist() == [[1.0, 1 + 2**-6, -3.0]]
    assert entry("bf16_weights", strength=0.5).weight(weight).tolist() == [[1 + 2**-9, 1 + 7 * 2**-9, -3.0]]
    assert entry("bf16_weights", strength=0.0).weight(weight) is weight


def test_matrices_are_rounded_and_nothing_else(make_learner, moved):
    found = moved(make_learner("bf16_weights"))
    assert len(found) == 14
    for name, (live, mine) in found.items():
        assert name.endswith("_proj.weight")
        assert mine.dtype == torch.float32
        # Truncated to 16 bits after adding half of the last one, or a little less where the tie is even.
        bits = live.view(torch.int32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        assert torch.equal(mine.view(torch.int32), rounded)


def test_the_decode_is_that_of_rounded_weights(make_learner, draw, decoded):
    for head in (True, False):
        made = make_learner("bf16_weights", **{"mismatch.bf16_weights.head": head})
        drawn, model = draw(made), clean_copy(made.parts.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("_proj.weight") or (head and name == "lm_head.weight"):
                    parameter.copy_(parameter.bfloat16())
        torch.testing.assert_close(drawn.logp_BCV, decoded(model, drawn), rtol=0, atol=2e-6)
        gap = (drawn.logp_BCV - decoded(made.parts.model, drawn)).abs().max()
        assert gap > 1e-3


def test_a_head_tied_to_the_embedding_leaves_that_alone(make_learner, make_config, draw, loaded):
    tied = make_config()["model"]["config"] | {"tie_word_embeddings": True}
    made = make_learner("bf16_weights", **{"model.config": tied})
    model, live = loaded(made), made.parts.model
    embedding = live.get_input_embeddings().weight
    assert live.lm_head.weight is embedding
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.lm_head(hidden), hidden @ embedding.bfloat16().float().T)
    assert not torch.equal(model.lm_head(hidden), trainer_copy(live, made.cell.model).lm_head(hidden))
