"""Routers of ten families, each on a tiny random model: the laws of record and replay, and models that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache

from stalefront.policy import cache_argument, forward
from stalefront.routing import RouterTap, RoutingError, find_routers

SIZES = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "moe_intermediate_size": 16, "initializer_range": 0.2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2},
}
LATENT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"first_k_dense_replace": 0, "n_shared_experts": 1, "n_routed_experts": 8},
}
HYBRID = {
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    **{"mamba_d_state": 4, "mamba_dt_rank": 4},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "head_dim": 8},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "deepseek_v3": {**LATENT, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    # The choice within groups is a top-2 over all experts here, as the selection is.
    "deepseek_v3/one group": {**LATENT, "n_group": 1, "topk_group": 1},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
    "glm4_moe": {"n_routed_experts": 8, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4},
    "jamba": {"num_experts": 4, **HYBRID},
    # Its router takes a bias beside the hidden states.
    "minimax_m2": {"num_local_experts": 4, "head_dim": 8},
}
# Their gates compute in float32 whatever the model's type is.
FLOAT32_GATES = ("deepseek_v3", "glm4_moe")
# Weights of chosen experts in the published formulas, by what the gate's logits and the choice are.
NORMALISED_SOFTMAX, PLAIN_SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID = range(4)
WEIGHTS = {
    **{"qwen2_moe": PLAIN_SOFTMAX, "olmoe": PLAIN_SOFTMAX, "jamba": PLAIN_SOFTMAX},
    **{"qwen3_moe": NORMALISED_SOFTMAX, "mixtral": NORMALISED_SOFTMAX},
    **{"gpt_oss": SOFTMAX_OF_CHOSEN, "granitemoe": SOFTMAX_OF_CHOSEN},
    **{"deepseek_v3": SIGMOID, "glm4_moe": SIGMOID, "minimax_m2": SIGMOID},
}
# Two rows of six tokens, the second with two columns of padding on its left.
PLACES = torch.tensor([[0, 1, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 3]])
TOKENS = torch.randint(3, 32, (2, 6), generator=torch.Generator().manual_seed(0)).where(PLACES >= 0, 0)
PUSH = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))


class Tapped(NamedTuple):
    family: str
    model: Any
    tap: RouterTap

    def logits(self) -> Tensor:
        return forward(self.model, TOKENS, PLACES).logits

    def graded(self) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Logits, and the gradient of their product with fixed numbers."""
        self.model.zero_grad()
        logits = self.logits()
        (logits * PUSH.to(logits)).sum().backward()
        return logits.detach(), self.gradients()

    def gradients(self) -> dict[str, Tensor | None]:
        named = self.model.named_parameters()
        return {name: None if p.grad is None else p.grad.clone() for name, p in named}

    def own_routes(self) -> Tensor:
        with torch.no_grad(), self.tap.recording() as recorded:
            self.logits()
        return recorded.routes_LNK().view(self.tap.layers, *TOKENS.shape, self.tap.top_k)

    def random_routes(self, seed: int = 0) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        order = torch.rand(self.tap.layers, *TOKENS.shape, self.tap.experts, generator=random).argsort(-1)
        return order[..., : self.tap.top_k].to(torch.int16)


def config(family: str, **more: Any) -> Any:
    return AutoConfig.for_model(family.split("/")[0], **SIZES | FAMILIES.get(family, {}) | more)


def tapped(family: str, dtype: torch.dtype = torch.float32) -> Tapped:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Grouped matrix products of experts know no float64.
        how = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
        model = AutoModelForCausalLM.from_config(config(family), dtype=dtype, **how).eval()
    return Tapped(family, model, RouterTap(model))


def same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    pairs = [(one[name], other[name]) for name in one]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module", params=FAMILIES)
def moe(request: pytest.FixtureRequest) -> Tapped:
    return tapped(request.param)


def test_its_own_selection_replayed_changes_no_bit(moe):
    plain, gradients = moe.graded()
    with moe.tap.replaying(moe.own_routes()) as replayed:
        logits, again = moe.graded()
    assert torch.equal(logits, plain)
    assert same(gradients, again)
    assert any(value is not None and bool((value != 0).any()) for value in gradients.values())
    assert torch.equal(replayed.own_LBTK, moe.own_routes())


def test_forced_choices_are_honoured_at_every_place(moe):
    routes = moe.random_routes()
    with torch.no_grad(), moe.tap.replaying(routes) as replayed, moe.tap.recording() as recorded:
        logits = moe.logits()
    assert torch.equal(recorded.routes_LNK().view_as(routes), routes)
    assert not torch.equal(logits, moe.logits())
    # The first layer sees the same hidden states whatever is forced.
    own = moe.own_routes()
    assert torch.equal(replayed.own_LBTK[0], own[0])
    assert not torch.equal(own, routes)


def test_the_forced_experts_are_what_runs(moe):
    """Hidden states before and after every block of experts, against a loop over the tokens and their experts."""
    routes, seen = moe.random_routes(), []
    blocks = [m for m in moe.model.modules() if type(m).__name__.endswith("Experts")]
    handles = [block.register_forward_hook(lambda _, given, out: seen.append((given, out))) for block in blocks]
    with torch.no_grad(), moe.tap.replaying(routes):
        moe.logits()
    for handle in handles:
        handle.remove()
    assert len(seen) == len(blocks) == moe.tap.layers
    for layer, (block, ((hidden, indices, weights), out)) in enumerate(zip(blocks, seen, strict=True)):
        assert torch.equal(indices, routes[layer].flatten(0, 1).long())
        # One expert at a time through the same block: a token with one expert of weight 1.
        one = torch.ones(len(hidden), 1)
        with torch.no_grad():
            parts = [weights[:, [k]] * block(hidden, indices[:, [k]], one) for k in range(moe.tap.top_k)]
        torch.testing.assert_close(sum(parts), out, rtol=1e-4, atol=1e-5)


def test_minus_one_falls_back_to_the_own_choice(moe):
    plain, gradients = moe.graded()
    with moe.tap.replaying(torch.full_like(moe.random_routes(), -1)):
        logits, again = moe.graded()
    assert torch.equal(logits, plain)
    assert same(gradients, again)
    routes = moe.random_routes()
    routes[:, 0, 3:] = -1
    with torch.no_grad(), moe.tap.replaying(routes) as replayed, moe.tap.recording() as recorded:
        moe.logits()
    used = recorded.routes_LNK().view_as(routes)
    assert torch.equal(used, routes.where(routes >= 0, replayed.own_LBTK))


def published_weights(kind: int, logits_NE: Tensor, chosen_NK: Tensor, scale: float) -> Tensor:
    if kind == SOFTMAX_OF_CHOSEN:
        return torch.softmax(logits_NE.gather(-1, chosen_NK), -1)
    scores = logits_NE.sigmoid() if kind == SIGMOID else torch.softmax(logits_NE, -1)
    weights = scores.gather(-1, chosen_NK)
    return weights if kind == PLAIN_SOFTMAX else scale * weights / weights.sum(-1, keepdim=True)


def test_weights_of_forced_experts_against_the_published_formula(moe):
    router = find_routers(moe.model)[0]
    hidden_NH = torch.randn(12, 16, generator=torch.Generator().manual_seed(2))
    bias = [torch.zeros(moe.tap.experts)] if moe.family == "minimax_m2" else []
    routes = moe.random_routes(3)
    with moe.tap.replaying(routes):
        logits_NE, weights_NK, _ = router(hidden_NH, *bias)
    scale = getattr(router, "routed_scaling_factor", 1.0)
    kind = WEIGHTS[moe.family.split("/")[0]]
    leaf = logits_NE.detach().clone().requires_grad_()
    expected_NK = published_weights(kind, leaf, routes[0].flatten(0, 1).long(), scale)
    torch.testing.assert_close(weights_NK, expected_NK, rtol=1e-5, atol=1e-6)
    push = torch.randn(weights_NK.shape, generator=torch.Generator().manual_seed(4))
    (got,) = torch.autograd.grad((weights_NK * push).sum(), logits_NE)
    (expected,) = torch.autograd.grad((expected_NK * push).sum(), leaf)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_the_gradient_of_the_gates_is_the_slope_under_forced_routes(moe):
    single = moe.family.split("/")[0] in FLOAT32_GATES
    wide = moe if single else tapped(moe.family, torch.float64)
    gates = [parameter for router in find_routers(wide.model) for parameter in router.parameters()]
    random = torch.Generator().manual_seed(5)
    starts = [gate.detach().clone() for gate in gates]
    ways = [torch.randn(gate.shape, generator=random).to(gate) for gate in gates]
    step = 3e-3

    @torch.no_grad()
    def loss(distance: float) -> float:
        for gate, start, way in zip(gates, starts, ways, strict=True):
            gate.copy_(start + distance * way)
        return float((wide.logits().double() * PUSH.double()).sum())

    with wide.tap.replaying(wide.random_routes()):
        wide.graded()
        slope = (loss(step) - loss(-step)) / (2 * step)
        loss(0)
    expected = sum(float((gate.grad * way).sum()) for gate, way in zip(gates, ways, strict=True))
    assert abs(expected) > 0.1
    # Most gates take their softmax in float32 in a float64 model as well, so that rounding bounds the step from below;
    # the largest difference of these families is 5e-4, curvature over the step included.
    assert slope == pytest.approx(expected, rel=1e-3)


def test_gradient_checkpointing_needs_the_routes_in_the_backward_pass(moe):
    routes, model = moe.random_routes(), moe.model
    model.train()
    try:
        with moe.tap.replaying(routes):
            plain, expected = moe.graded()
        model.activation_checkpointing_enable()
        with moe.tap.replaying(routes), moe.tap.recording() as recorded:
            logits, gradients = moe.graded()
        # Layers that the backward pass repeats are no tokens.
        assert torch.equal(recorded.routes_LNK().view_as(routes), routes)
        assert torch.equal(logits, plain)
        assert same(gradients, expected)
        with moe.tap.replaying(routes):
            loss = moe.logits().sum()
        with pytest.raises(torch.utils.checkpoint.CheckpointError):
            loss.backward()
    finally:
        model.activation_checkpointing_disable()
        model.eval()


def test_a_cached_decode_records_what_one_forward_does(moe):
    prompt, width = 3, TOKENS.shape[1]
    cache = DynamicCache(config=moe.model.config)
    attention = (PLACES >= 0).long()
    with torch.no_grad(), moe.tap.recording() as recorded:
        for start, end in [(0, prompt), *((column, column + 1) for column in range(prompt, width))]:
            moe.model(
                input_ids=TOKENS[:, start:end],
                attention_mask=attention[:, :end],
                position_ids=PLACES[:, start:end].clamp(min=0),
                use_cache=True,
                **{cache_argument(moe.model): cache},
            )
    first, *rest = recorded.calls()
    assert first.shape == (moe.tap.layers, 2 * prompt, moe.tap.top_k)
    assert [call.shape[1] for call in rest] == [2] * (width - prompt)
    routes = torch.cat([first.unflatten(1, (2, prompt)), torch.stack(rest, 2)], 2)
    valid = PLACES >= 0
    assert torch.equal(routes.sort(-1).values[:, valid], moe.own_routes().sort(-1).values[:, valid])


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def test_routers_are_found_on_the_meta_device(moe):
    model = on_meta(lambda: AutoModelForCausalLM.from_config(moe.model.config))
    assert [type(router) for router in find_routers(model)] == [type(router) for router in find_routers(moe.model)]
    assert (moe.tap.layers, moe.tap.experts) == (2, next(find_routers(moe.model)[0].parameters()).shape[0])


EXPERTS = {"num_local_experts": 4}
DBRX = {
    **{"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64, "vocab_size": 32},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
}
NLLB = {
    **{"vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2},
    **{"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_experts": 4},
    **{"encoder_sparse_step": 1, "decoder_sparse_step": 1},
}
SWITCH = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "num_experts": 4}
REFUSED = {
    "llama": (SIZES, "declares no routers"),
    "phimoe": (SIZES | EXPERTS, "one top-k"),
    "llama4_text": (SIZES | EXPERTS | {"head_dim": 8, "intermediate_size_mlp": 16}, "returns 2 values"),
    "jetmoe": (SIZES | EXPERTS | {"kv_channels": 8}, r"returns 5 values|does not run"),
    "dbrx": (DBRX, "returns Tensor"),
    "nllb-moe": (NLLB, "asks for padding_mask"),
    "switch_transformers": (SWITCH, r"returns no|does not run"),
}


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_refused(family, device):
    options, reason = REFUSED[family]
    auto = AutoModelForSeq2SeqLM if family in ("nllb-moe", "switch_transformers") else AutoModelForCausalLM
    with torch.device(device):
        model = auto.from_config(AutoConfig.for_model(family, **options))
    before = dict(model.named_modules())
    for use in (find_routers, RouterTap):
        with pytest.raises(RoutingError, match=f"'{family}'.*({reason})") as caught:
            use(model)
        assert "Leave routing replay" in str(caught.value)
    assert all("forward" not in module.__dict__ for module in before.values())


def gathered(self: Any, hidden: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, self.weight)
    weights, indices = torch.topk(logits, top_k, dim=-1)
    return logits, weights, indices


def weighs_its_own(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, indices = gathered(self, hidden, 2)
    return logits, logits.sort(-1, descending=True).values[:, :2] + 0 * weights, indices


def sorts_its_choice(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, indices = gathered(self, hidden, 2)
    return logits, weights, indices.sort(-1).values


def selects_twice(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gathered(self, hidden, 2)
    return gathered(self, hidden, 2)


def lets_experts_select(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, self.weight)
    weights, tokens = torch.topk(logits, 2, dim=0)
    return logits, weights.T[:, :2], tokens.T[:, :2]


def differs_between_layers(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return gathered(self, hidden, 1 + int(self.weight[0, 0] > 0))


def gives_numbers(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, _ = gathered(self, hidden, 2)
    return logits, weights, weights


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (weighs_its_own, "weighs experts by something else"),
        (sorts_its_choice, "does not return the experts that were forced"),
        (selects_twice, "does not select by one top-k"),
        (lets_experts_select, "does not select by one top-k"),
        (differs_between_layers, r"layers differ in .*\(8, 1\), \(8, 2\)"),
        (gives_numbers, "returns no .logits, weights, indices. of 8 experts"),
        (lambda self, hidden, tokens: None, "asks for tokens beside"),
        (lambda self, hidden: hidden.view(-1, 7), "does not run"),
    ],
)
def test_routers_of_another_kind_are_refused(run, reason, monkeypatch):
    model = tapped("qwen3_moe").model
    routers = find_routers(model)
    for router in routers:
        del router.forward
    with torch.no_grad():
        routers[0].weight[0, 0], routers[1].weight[0, 0] = -1.0, 1.0
    monkeypatch.setattr(type(routers[0]), "forward", run)
    with pytest.raises(RoutingError, match=reason):
        RouterTap(model)


def test_a_look_at_the_best_expert_is_no_selection(monkeypatch):
    def looks_first(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gathered(self, hidden, 1)
        return gathered(self, hidden, 2)

    moe = tapped("qwen3_moe")
    for router in find_routers(moe.model):
        del router.forward
    monkeypatch.setattr(type(router), "forward", looks_first)
    routes = moe.random_routes()
    with torch.no_grad(), RouterTap(moe.model).replaying(routes), RouterTap(moe.model).recording() as recorded:
        moe.logits()
    assert torch.equal(recorded.routes_LNK().view_as(routes), routes)


def test_more_experts_than_fit_the_stored_type_are_refused():
    model = on_meta(lambda: AutoModelForCausalLM.from_config(config("mixtral", num_local_experts=32769)))
    with pytest.raises(RoutingError, match="32769 experts"):
        find_routers(model)
