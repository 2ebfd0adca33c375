"""Ways to the logits of the next token: against a full forward, against a cache by hand, and against one another."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from stalefront.decoding import Blended, Cached, Chunked, Prompts, Routers, Teacher
from stalefront.policy import cache_argument, completion_logits
from stalefront.routing import RouterTap

SIZES = {
    **{"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "head_dim": 8},
    **{"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
}
G, STEPS = 2, 3
# Left-padded, with one prompt of a single token.
PROMPTS = Prompts(
    torch.tensor([[0, 0, 3, 7], [5, 6, 7, 8], [0, 0, 0, 9]]),
    torch.tensor([[-1, -1, 0, 1], [0, 1, 2, 3], [-1, -1, -1, 0]]),
)
DRAWN = torch.randint(2, 16, (STEPS, 3 * G), generator=torch.Generator().manual_seed(0))


def build(model_type="qwen3_moe", seed=0, **changes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **SIZES | changes)
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def older():
    return build(seed=1)


@torch.no_grad()
def logits_of(decoding, drawn=DRAWN):
    """Logits of every column, (B, C, V)."""
    found = [decoding.logits]
    for token_B in drawn:
        decoding.advance(token_B)
        found.append(decoding.logits)
    return torch.stack(found, 1)


@torch.no_grad()
def full_forward(model, drawn=DRAWN):
    """The same without a cache: one teacher-forced forward of each row, without its padding."""
    found = []
    for row in range(3 * G):
        kept = PROMPTS.position_PL[row // G] >= 0
        tokens = torch.cat([PROMPTS.tokens_PL[row // G][kept], drawn[:, row]])
        found.append(model(input_ids=tokens[None]).logits[0, int(kept.sum()) - 1 :].float())
    return torch.stack(found)


def recorded(model, prompts=PROMPTS, rows=slice(None), first_row=0, **how):
    tap = RouterTap(model)
    return Cached(model, prompts.rows(rows), G, routers=Routers(tap, lambda *_: []), first_row=first_row, **how)


def test_a_cached_decode_is_a_full_forward(model):
    with torch.no_grad():
        got = logits_of(Cached(model, PROMPTS, G))
    assert got.dtype == torch.float32
    assert torch.allclose(got, full_forward(model), atol=1e-5)


def test_routes_of_every_token_fed(model):
    with torch.no_grad():
        decoding = recorded(model)
        logits_of(decoding)
    routes = decoding.routes_LBTK()
    assert routes.shape == (2, 3 * G, 4 + STEPS, 2)
    assert routes.dtype == torch.int16
    padding = torch.nn.functional.pad(PROMPTS.position_PL < 0, (0, STEPS)).repeat_interleave(G, 0)
    assert (routes[:, padding] == -1).all()
    assert (routes[:, ~padding] >= 0).all()
    with torch.no_grad(), RouterTap(model).recording() as alone:
        model(input_ids=torch.cat([PROMPTS.tokens_PL[0, 2:], DRAWN[:, 1]])[None])
    assert torch.equal(routes[:, 1, 2:].sort(-1).values, alone.routes_LNK().sort(-1).values)


def test_changes_are_told_the_row_and_the_place_of_every_token(model):
    told = []
    routers = Routers(RouterTap(model), lambda row_N, position_N: told.append((row_N, position_N)) or [])
    with torch.no_grad():
        logits_of(Cached(model, PROMPTS, G, routers=routers, first_row=10))
    # The prompt is run once a group, in the name of the group's first row.
    assert told[0][0].tolist() == [10] * 4 + [12] * 4 + [14] * 4
    assert told[0][1].tolist() == [0, 0, 0, 1, 0, 1, 2, 3, 0, 0, 0, 0]
    assert [row_N.tolist() for row_N, _ in told[1:]] == [list(range(10, 16))] * STEPS
    starts = torch.tensor([2, 2, 4, 4, 1, 1])
    assert [place.tolist() for _, place in told[1:]] == [(starts + step).tolist() for step in range(STEPS)]


@torch.no_grad()
def by_hand(older, model, row):
    """Logits after a cache of all but the prompt's last token by `older`, without padding."""
    kept = PROMPTS.position_PL[row // G] >= 0
    tokens = torch.cat([PROMPTS.tokens_PL[row // G][kept], DRAWN[:, row]])[None]
    length, name = int(kept.sum()), cache_argument(model)
    cache = DynamicCache(config=model.config)
    if length > 1:
        older(input_ids=tokens[:, : length - 1], use_cache=True, **{name: cache})
    return model(input_ids=tokens[:, length - 1 :], use_cache=True, **{name: cache}).logits[0]


def test_a_stale_cache_is_the_older_models(model, older):
    with torch.no_grad():
        decoding = recorded(model, before=older, stale=1.0)
        got = logits_of(decoding)
    expected = torch.stack([by_hand(older, model, row) for row in range(3 * G)])
    assert torch.allclose(got, expected, atol=1e-5)
    assert (got - full_forward(model))[:4].abs().max() > 0.1
    # A prompt of one token has nothing before it.
    assert torch.allclose(got[4:], full_forward(model)[4:], atol=1e-5)
    routes = decoding.routes_LBTK()
    assert (routes[:, :, :3] == -1).all()
    assert (routes[:, :, 3:] >= 0).all()


def test_no_part_of_a_stale_cache_is_the_plain_one(model, older):
    with torch.no_grad():
        plain = logits_of(Cached(model, PROMPTS, G))
        none = logits_of(Cached(model, PROMPTS, G, before=older, stale=0.0))
        some = logits_of(Cached(model, PROMPTS, G, before=older, stale=0.5))
        same = logits_of(Cached(model, PROMPTS, G, before=model, stale=0.7))
        short = Cached(model, Prompts(PROMPTS.tokens_PL[:, -1:], torch.zeros(3, 1).long()), G, before=older, stale=1.0)
        alone = Cached(model, Prompts(PROMPTS.tokens_PL[:, -1:], torch.zeros(3, 1).long()), G)
    assert torch.allclose(none, plain, atol=1e-5)
    assert torch.allclose(same, plain, atol=1e-5)
    assert (some - plain)[:4].abs().max() > 0.01
    assert torch.equal(short.logits, alone.logits)


def test_an_older_cache_asks_for_one_column_of_logits(model, older, monkeypatch):
    asked = []
    forward = older.forward
    monkeypatch.setattr(older, "forward", lambda **run: asked.append(run["logits_to_keep"]) or forward(**run))
    assert "logits_to_keep" in inspect.signature(forward).parameters
    monkeypatch.setattr("stalefront.decoding.cache_argument", lambda _: cache_argument(model))
    with torch.no_grad():
        Cached(model, PROMPTS, G, before=older, stale=1.0)
    assert asked == [1]


@pytest.mark.parametrize("size", [1, 2])
def test_chunks_are_the_batch_to_rounding(model, size):
    with torch.no_grad():
        whole = recorded(model)
        spans = [slice(start, min(start + size, 3)) for start in range(0, 3, size)]
        parts = [recorded(model, rows=span, first_row=span.start * G) for span in spans]
        chunked = Chunked(parts, [(span.stop - span.start) * G for span in spans])
        expected, got = logits_of(whole), logits_of(chunked)
    assert torch.allclose(got, expected, atol=1e-5)
    assert torch.equal(chunked.routes_LBTK(), whole.routes_LBTK())
    assert [part.row_B.tolist() for part in parts] == [list(range(s.start * G, s.stop * G)) for s in spans]
    assert Chunked([Cached(model, PROMPTS, G)], [3 * G]).routes_LBTK() is None


@pytest.mark.parametrize("strength", [0.0, 0.25, 1.0, 3.0])
def test_blends_are_linear_in_the_logits(model, older, strength):
    with torch.no_grad():
        one, two = logits_of(Cached(model, PROMPTS, G)), logits_of(Cached(older, PROMPTS, G))
        blended = Blended(Cached(model, PROMPTS, G), recorded(older), strength)
        got = logits_of(blended)
    assert torch.allclose(got, (1 - strength) * one + strength * two, atol=1e-4)
    if strength == 0:
        assert torch.equal(got, one)
    assert blended.routes_LBTK().shape == (2, 3 * G, 4 + STEPS, 2)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_a_teacher_is_one_full_forward_of_every_slice(model_type):
    model, calls = build(model_type), []

    def logits(tokens, position):
        calls.append(tokens.shape)
        return completion_logits(model, tokens, position, first=4)

    slices = [torch.arange(4), torch.arange(4, 6)]
    with torch.no_grad():
        teacher = Teacher(logits, PROMPTS, G, slices=slices, length=STEPS + 1, pad=0)
        got = logits_of(teacher)
    assert torch.allclose(got, full_forward(model), atol=1e-5)
    assert teacher.routes_LBTK() is None
    assert set(calls) == {(4, 4 + STEPS + 1), (2, 4 + STEPS + 1)}
    # To the last bit what a teacher-forced forward of the finished sequences gives in these shapes; of a mixture of
    # experts to rounding, since how many tokens an expert gets depends on those that are still padding.
    for rows in slices:
        with torch.no_grad():
            finished = completion_logits(model, teacher.tokens_BT[rows], teacher.position_BT[rows], first=4)
        assert torch.allclose(got[rows], finished, rtol=0, atol=0 if model_type == "llama" else 1e-5)


def test_weights_that_are_gone_show_everywhere(model):
    gone = build()
    with torch.no_grad():
        gone.lm_head.weight.fill_(float("nan"))
        assert logits_of(Blended(Cached(model, PROMPTS, G), Cached(gone, PROMPTS, G), 0.5)).isnan().all()
