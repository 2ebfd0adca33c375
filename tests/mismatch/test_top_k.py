"""Top-k sampling: cuts by hand, renormalised softmax of the k largest, and the support the trainer is told."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.mismatch import Noise

NO_NOISE = Noise(torch.zeros(1, dtype=torch.int64), 0)
THREE = {"mismatch.top_k.k": 3}


def test_values_by_hand(entry):
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]]).log()
    found = entry("top_k", k=2)(logits, NO_NOISE).softmax(-1)
    # Of equal ones those with the lowest ids.
    torch.testing.assert_close(found, torch.tensor([[0.0, 4 / 7, 3 / 7, 0.0], [0.5, 0.5, 0.0, 0.0]]))
    part = entry("top_k", k=2, strength=0.5)(logits, NO_NOISE).softmax(-1)
    torch.testing.assert_close(part[0], torch.tensor([0.05, 0.4, 0.3, 0.1]) / 0.85)
    assert entry("top_k", k=2, strength=0.0)(logits, NO_NOISE) is logits


def test_as_many_words_as_there_are_cut_nothing(entry):
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(entry("top_k", k=5)(logits, NO_NOISE), logits)
    assert torch.equal(entry("top_k", k=99)(logits, NO_NOISE), logits)


def test_a_rollout_is_drawn_from_the_softmax_of_the_k_largest(make_learner, draw, decoded):
    made = make_learner("top_k", **THREE)
    drawn = draw(made)
    largest = decoded(made.parts.model, drawn).topk(3, -1)
    expected = torch.full_like(drawn.logp_BCV, -math.inf)
    expected = expected.scatter(-1, largest.indices, torch.log_softmax(largest.values, -1))
    torch.testing.assert_close(drawn.logp_BCV, expected, rtol=0, atol=1e-5)
    chosen = drawn.tokens_BC[drawn.mask_BC][:, None]
    assert (largest.indices[drawn.mask_BC] == chosen).any(-1).all()


def test_the_trainer_is_told_the_k_words_where_asked(make_learner, draw, decoded):
    made = make_learner("top_k", **THREE, **{"mismatch.top_k.keep_mask": True})
    _, row = made.advance()
    batch = made.batch
    assert batch.support_BTK.shape[2] == 3
    assert (batch.support_BTK[batch.mask_BT] >= 0).all()
    assert (batch.support_BTK[~batch.mask_BT] == -1).all()
    torch.testing.assert_close(batch.logp_old_BT, batch.logp_behav_BT, rtol=0, atol=1e-5)
    assert abs(row["mismatch_k3_nats"]) < 1e-10


def test_one_word_alone_is_certain(make_learner):
    made = make_learner("top_k", **{"mismatch.top_k.k": 1, "mismatch.top_k.keep_mask": True})
    batch = made.source.take(0)
    assert (batch.logp_behav_BT == 0).all()
    assert (batch.logp_old_BT == 0).all()
    assert torch.equal(batch.support_BTK[batch.mask_BT][:, 0].long(), batch.tokens_BT[batch.mask_BT])


def test_options(refused, make_cell):
    refused("top_k", "k", k=0)
    refused("top_k", "strength", strength=0.5, keep_mask=True)
    with pytest.raises(OptionError) as error:
        make_cell(mismatch=["top_k"], **{"mismatch.top_k.keep_mask": True, "mismatch.top_k.logged": "raw"})
    assert error.value.field == "mismatch.top_k.logged"
