"""The sampler: its log-probs are the trainer's, padding and batching are invisible, and it draws what it should."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stalefront.model import character_tokenizer
from stalefront.policy import token_logps
from stalefront.rollout import Sampler

TOKENIZER = character_tokenizer("0123456789_>+=")
MIXED = ["_52413>", "_7>", "1+2=", "_0123>"]


def small(model_type="llama", **changes):
    options = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
               "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
               "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(options | changes))).eval()


@pytest.fixture(scope="module")
def model():
    return small()


def sampler(**changes):
    options = {"max_completion_length": 6, "temperature": 1.0, "stop": None, "end_ids": [1]}
    return Sampler(TOKENIZER, **(options | changes))


def draw(engine, model, texts, generations=4, seed=0, batch=1):
    prompts = engine.pad([TOKENIZER.encode(text) for text in texts], torch.device("cpu"))
    return engine.sample(model, prompts, num_generations=generations, seed=seed, purpose="rollout", batch=batch)


def trainer(model, got, temperature=1.0):
    return token_logps(model, got.tokens_BT, got.position_BT, got.mask_BT, temperature=temperature)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_trainer_agree_without_lag(model_type, temperature):
    changes = {"head_dim": 8} if model_type in ("gemma", "qwen3") else {}
    policy = small(model_type, **changes)
    got = draw(sampler(temperature=temperature), policy, MIXED)
    again = trainer(policy, got, temperature)
    assert (got.logp_behav_BT - again.logp_BT).abs().max() < 2e-6
    assert not got.logp_behav_BT[~got.mask_BT].any()
    assert not again.logp_BT[~got.mask_BT].any()


def test_log_probs_by_hand(model):
    got = draw(sampler(), model, ["_52413>"], generations=1)
    row, where = got.tokens_BT[0], int(got.mask_BT[0].float().argmax())
    logits = model(input_ids=row[None]).logits[0].detach().float()
    for place in range(where, len(row)):
        if got.mask_BT[0, place]:
            expected = torch.log_softmax(logits[place - 1], -1)
            assert float(got.logp_behav_BT[0, place]) == pytest.approx(float(expected[row[place]]), abs=2e-6)
            entropy = -(expected.exp() * expected).sum()
            assert float(trainer(model, got).entropy_BT[0, place]) == pytest.approx(float(entropy), abs=2e-6)


def test_a_row_does_not_depend_on_padding_or_neighbours(model):
    together = draw(sampler(), model, MIXED, generations=2)
    alone = draw(sampler(), model, MIXED[:1], generations=2)
    assert together.texts[:2] == alone.texts
    length = alone.tokens_BT.shape[1]
    assert torch.allclose(
        together.logp_behav_BT[:2][together.mask_BT[:2]], alone.logp_behav_BT[alone.mask_BT], atol=2e-6
    )
    assert together.tokens_BT.shape[1] >= length


def test_padding_is_inert_in_the_trainers_forward(model):
    got = draw(sampler(), model, MIXED[:1], generations=2)
    wide = torch.nn.functional.pad(got.tokens_BT, (3, 0)), torch.nn.functional.pad(got.position_BT, (3, 0), value=-1)
    mask = torch.nn.functional.pad(got.mask_BT, (3, 0))
    padded = token_logps(model, wide[0], wide[1], mask, temperature=1.0)
    assert torch.allclose(padded.logp_BT[:, 3:], trainer(model, got).logp_BT, atol=2e-6)


def test_draws_follow_the_distribution(model):
    texts = ["_52413>"]
    got = draw(sampler(max_completion_length=1), model, texts, generations=4000)
    counts = torch.bincount(got.tokens_BT[:, -1], minlength=16).double() / 4000
    logits = model(input_ids=torch.tensor([TOKENIZER.encode(texts[0])])).logits[0, -1]
    expected = torch.softmax(logits.double(), -1)
    # Five standard errors of a share of 4,000 draws.
    assert ((counts - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()


def test_completions_end_at_the_end_token_or_are_cut(model):
    got = draw(sampler(max_completion_length=20), model, ["_52413>"], generations=64)
    for b in range(64):
        tokens = got.tokens_BT[b][got.mask_BT[b]].tolist()
        assert (1 in tokens) != bool(got.truncated_B[b])
        assert 1 not in tokens[:-1]
        assert len(got.completion_ids[b]) == len(tokens) - (not got.truncated_B[b])
        assert got.texts[b] == TOKENIZER.decode(got.completion_ids[b])
    assert 0 < int(got.truncated_B.sum()) < 64
    after = ~got.mask_BT & (got.position_BT >= 7)
    assert (got.tokens_BT[after] == 0).all()


def test_a_stop_text_ends_a_completion_and_is_not_part_of_it(model):
    got = draw(sampler(max_completion_length=20, stop="="), model, ["_52413>"], generations=64)
    stopped = [b for b in range(64) if TOKENIZER.encode("=")[0] in got.completion_ids[b]]
    assert stopped
    for b in stopped:
        assert got.completion_ids[b][-1] == TOKENIZER.encode("=")[0]
        assert "=" not in got.texts[b]
        assert not got.truncated_B[b]


def test_weights_that_are_nan_give_nan_log_probs_not_a_crash():
    gone = small()
    with torch.no_grad():
        gone.lm_head.weight.fill_(float("nan"))
    got = draw(sampler(), gone, ["_52413>"])
    assert got.logp_behav_BT[got.mask_BT].isnan().all()
