"""Completions that travel as text: rows by hand, a tokenizer that gives other tokens back, and what is forgotten."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from stalefront.model import character_tokenizer
from stalefront.noise import row_keys, uniforms
from stalefront.rollout import Samples
from stalefront.routing import token_hash_B

CHARACTERS = "0123456789_>+="
PAIRS = ["12", "34", "00", "77", "98"]
WORDS = {word: place for place, word in enumerate(["<pad>", "<eos>", *CHARACTERS, *PAIRS])}
PAD, EOS = 0, 1
SIZES = {
    **{"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
    **{"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": PAD},
    **{"eos_token_id": EOS, "bos_token_id": None},
}


def pairing():
    """A tokenizer that joins some pairs of characters; a sampler may well give them apart."""
    core = Tokenizer(models.BPE(WORDS, [tuple(pair) for pair in PAIRS]))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def samples_of(rows, prompt=2, **more):
    """Samples with these words as completions; log-probs count down from −1."""
    width = max(map(len, rows))
    tokens = torch.tensor([[2] * prompt + [WORDS[w] for w in row] + [PAD] * (width - len(row)) for row in rows])
    mask = torch.tensor([[False] * prompt + [True] * len(row) + [False] * (width - len(row)) for row in rows])
    logp = -torch.arange(1.0, width + 1).expand(len(rows), -1)
    return Samples(
        tokens_BT=tokens,
        position_BT=torch.arange(prompt + width).expand(len(rows), -1),
        mask_BT=mask,
        logp_behav_BT=torch.cat([torch.zeros(len(rows), prompt), logp], 1).where(mask, 0.0),
        truncated_B=torch.zeros(len(rows), dtype=torch.bool),
        completion_ids=[[WORDS[w] for w in row if w != "<eos>"] for row in rows],
        texts=["".join(row) for row in rows],
        **more,
    )


def again(entry, samples, tokenizer=None, **fields):
    key_B = row_keys(0, "test", 1, len(samples.tokens_BT))
    return entry("retokenise", **fields)(samples, key_B, tokenizer or pairing(), [EOS])


def test_rows_by_hand(entry):
    found = again(entry, samples_of([["1", "2", "5", "<eos>"], ["5", "6", "7", "7"], ["12", "<eos>"]]))
    words = [[WORDS[w] for w in row] for row in (["12", "5", "<eos>"], ["5", "6", "77"], ["12", "<eos>"])]
    assert found.tokens_BT[:, 2:].tolist() == [[*row, *[PAD] * (4 - len(row))] for row in words]
    assert found.tokens_BT[:, :2].tolist() == [[2, 2]] * 3
    # New tokens have no log-prob and are masked; those over the same characters keep theirs.
    assert found.mask_BT[:, 2:].int().tolist() == [[0, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert found.logp_behav_BT[:, 2:].tolist() == [[0, -3, -4, 0], [-1, -2, 0, 0], [-1, -2, 0, 0]]
    assert found.misaligned_B.tolist() == [2, 2, 0]
    # What was sampled is what is rewarded.
    assert found.texts == ["125<eos>", "5677", "12<eos>"]


def test_more_tokens_than_were_sampled_widen_the_batch(entry):
    core = Tokenizer(models.BPE(WORDS, []))
    core.decoder = decoders.Fuse()
    splitting = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    found = again(entry, samples_of([["12", "34", "<eos>"], ["5", "<eos>"]]), splitting)
    assert found.tokens_BT.shape == found.mask_BT.shape == found.position_BT.shape == (2, 7)
    assert found.tokens_BT[0, 2:].tolist() == [*(WORDS[c] for c in "1234"), EOS]
    assert found.position_BT[0].tolist() == list(range(7))
    assert found.mask_BT[:, 2:].int().tolist() == [[0, 0, 0, 0, 1], [1, 1, 0, 0, 0]]
    assert found.logp_behav_BT[0, 6] == -3
    assert found.misaligned_B.tolist() == [2, 0]


def test_one_token_a_character_comes_back_as_it_was(entry):
    samples = samples_of([["1", "2", "<eos>"], ["3", "4", "5", "6"]])
    found = again(entry, samples, character_tokenizer(CHARACTERS))
    for name in ("tokens_BT", "position_BT", "mask_BT", "logp_behav_BT"):
        assert torch.equal(getattr(found, name), getattr(samples, name))
    assert found.misaligned_B.tolist() == [0, 0]


def test_strength_is_a_share_of_the_rows(entry):
    samples = samples_of([["1", "2", "<eos>"]] * 400)
    found = again(entry, samples, strength=0.3)
    chosen = uniforms(row_keys(0, "test", 1, 400), 0, 1).squeeze(-1) < 0.3
    assert torch.equal(found.misaligned_B == 2, chosen)
    assert torch.equal(found.tokens_BT[~chosen], samples.tokens_BT[~chosen])
    assert 80 < int(chosen.sum()) < 160


def test_what_belonged_to_tokens_that_are_gone_is_forgotten(entry):
    rows = [["1", "2", "<eos>"], ["1", "3", "<eos>"]]
    plain = samples_of(rows)
    routes, support = torch.ones(2, 2, 5, 2, dtype=torch.int16), torch.full((2, 5, 3), 4, dtype=torch.int32)
    hashed = token_hash_B(plain.tokens_BT)
    found = again(entry, samples_of(rows, routes_LBTK=routes, support_BTK=support, route_hash_B=hashed))
    assert (found.routes_LBTK[:, 0, 2:] == -1).all()
    assert (found.routes_LBTK[:, 0, :2] == 1).all()
    assert torch.equal(found.routes_LBTK[:, 1], routes[:, 1])
    assert (found.support_BTK[0] == -1).all()
    assert torch.equal(found.support_BTK[1], support[1])
    assert found.route_hash_B[0] != hashed[0]
    assert found.route_hash_B[1] == hashed[1]
    # The record that came in is as it was.
    assert (routes == 1).all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small model with experts and a tokenizer that joins pairs; its samples are random."""
    folder = tmp_path_factory.mktemp("pairing")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SIZES)).save_pretrained(folder)
    pairing().save_pretrained(folder)
    return {
        **{"model.checkpoint": str(folder), "model.config": None, "model.alphabet": None},
        **{"model.warmup": None, "task.num_prompts": 8, "task.max_completion_length": 12},
    }


def cell_of(make_learner, checkpoint, *mismatch, **overrides):
    small = {"model.warmup.steps": 1, "model.warmup.batch_size": 1}
    return make_learner(*mismatch, **small | checkpoint | overrides)


def test_a_cell_whose_text_is_encoded_again(make_learner, checkpoint):
    made, plain = cell_of(make_learner, checkpoint, "retokenise"), cell_of(make_learner, checkpoint)
    _, row = made.advance()
    batch, sampled = made.batch, plain.source.take(0)
    assert torch.equal(batch.reward_B, sampled.reward_B)
    changed = (batch.misaligned_B > 0).nonzero().squeeze(-1).tolist()
    assert 0 < len(changed) < 32
    first = int(sampled.mask_BT.any(0).float().argmax())
    for b in range(32):
        before = sampled.tokens_BT[b, first:][sampled.mask_BT[b, first:]].tolist()
        ended = before[-1] == EOS
        text = made.parts.tokenizer.decode(before[: len(before) - ended])
        expected = [*made.parts.tokenizer.encode(text, add_special_tokens=False), *([EOS] if ended else [])]
        assert batch.tokens_BT[b, first : first + len(expected)].tolist() == expected
        routes, theirs = batch.routes_LBTK[:, b], sampled.routes_LBTK[:, b]
        assert torch.equal(routes[:, :first], theirs[:, :first])
        assert (routes[:, first:] == -1).all() if b in changed else torch.equal(routes, theirs)
    lost = int(batch.misaligned_B.sum())
    assert row["misaligned_frac"] == lost / (int(batch.mask_BT.sum()) + lost)
    # What was not lost still belongs to its row: the same numbers, and fewer of them.
    assert int(sampled.mask_BT.sum()) == int(batch.mask_BT.sum()) + lost
    for b in set(range(32)) - set(changed):
        assert torch.equal(batch.logp_behav_BT[b][batch.mask_BT[b]], sampled.logp_behav_BT[b][sampled.mask_BT[b]])


def test_routes_that_are_left_can_be_replayed(make_learner, checkpoint):
    made = cell_of(make_learner, checkpoint, "retokenise", replay="r3")
    _, row = made.advance()
    assert 0 < row["route_fallback_frac"] < 1


def test_a_cell_of_characters_loses_nothing(make_learner):
    rows = [make_learner(*mismatch).advance()[1] for mismatch in (["retokenise"], [])]
    assert [row["misaligned_frac"] for row in rows] == [0.0, None]
    assert rows[0]["old_mu_k3_nats"] == rows[1]["old_mu_k3_nats"]


def test_options(refused):
    refused("retokenise", "strength", strength=1.1)
