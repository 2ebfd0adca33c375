"""A module of the sampler's own: the trainer's bits without entries, and exactly the matrices that entries name."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stalefront.cell import make_choice
from stalefront.choice import OptionError
from stalefront.model import clean_copy
from stalefront.routing import RouterTap
from stalefront.sampler_module import SamplerModule, float32_logits

SIZES = {
    **{"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "head_dim": 8},
    **{"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
}
TOKENS = torch.randint(16, (3, 7), generator=torch.Generator().manual_seed(0))


def build(model_type="qwen3_moe", seed=0, dtype=torch.float32, **changes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **SIZES | changes)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.fixture
def entry(conf_choice):
    """`entry("int8", dynamic=True)`: an injector of `conf/mismatch/`."""
    return lambda name, **fields: make_choice("mismatch", conf_choice("mismatch", name) | fields)


def own(model, *injectors, dtype=None, float32_head=False):
    return SamplerModule(model, injectors, dtype=dtype, float32_head=float32_head)


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_without_entries_it_is_the_model_to_the_last_bit(model_type, dtype, tied):
    model = build(model_type, dtype=dtype, tie_word_embeddings=tied)
    module = own(model)
    # Whatever weights it is given next.
    other = build(model_type, seed=1, dtype=dtype, tie_word_embeddings=tied)
    for given in (model, other):
        assert torch.equal(logits(module.load(given)), logits(given))
    live = logits(model)
    module.load(other)
    assert torch.equal(logits(model), live)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("strength", [1.0, 0.5, 0.0])
def test_which_matrices_are_rounded(model_type, head, strength, entry):
    model = build(model_type)
    rounding = entry("int4", head=head, strength=strength)
    module = own(model, rounding)
    # By name: projections and experts, the head where asked; no embedding, norm or gate of a router.
    expected = clean_copy(model)
    names = ("proj.weight", "experts.gate_up_proj", "experts.down_proj", *(("lm_head.weight",) if head else ()))
    with torch.no_grad():
        for name, weight in expected.named_parameters():
            if name.endswith(names):
                weight.copy_(weight + strength * (rounding.rounded(weight) - weight))
    loaded = module.load(model)
    assert torch.allclose(logits(loaded), logits(expected), atol=1e-5)
    assert torch.equal(logits(loaded), logits(model)) == (strength == 0)
    for (name, mine), live in zip(loaded.named_parameters(), model.parameters(), strict=True):
        changed = strength > 0 and name.endswith(names) and name != "lm_head.weight"
        assert torch.equal(mine, live) != changed, name


def test_a_rounded_head_leaves_a_tied_embedding_as_it_is(entry):
    model = build("llama", tie_word_embeddings=True)
    loaded = own(model, entry("int4", head=True)).load(model)
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    body = own(model, entry("int4", head=False)).load(model)
    with torch.no_grad():
        hidden = body.model(input_ids=TOKENS).last_hidden_state
        weight = entry("int4").rounded(model.lm_head.weight)
    assert torch.allclose(logits(loaded), torch.nn.functional.linear(hidden, weight), atol=1e-6)
    assert not torch.allclose(logits(loaded), logits(body), atol=1e-2)


def test_entries_that_act_are_taken_up_by_the_next_load(entry):
    model = build()
    module = own(model, entry("int8"))
    rounded = logits(module.load(model))
    module.injectors = []
    assert torch.equal(logits(module.load(model)), logits(model))
    module.injectors = [entry("int8")]
    assert torch.equal(logits(module.load(model)), rounded)
    assert not torch.equal(rounded, logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_a_cast_of_everything_but_buffers(dtype):
    model = build("llama")
    loaded = own(model, dtype=dtype).load(model)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert {b.dtype for b in loaded.buffers()} == {torch.float32}
    assert logits(loaded).dtype == dtype
    for mine, live in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, live.to(dtype))
    assert 0 < (logits(loaded).float() - logits(model)).abs().max() < 0.5


@pytest.mark.parametrize("tied", [False, True])
def test_a_float32_head_on_a_module_in_half_precision(tied):
    model = build("llama", tie_word_embeddings=tied)
    loaded = own(model, dtype=torch.bfloat16, float32_head=True).load(model)
    with torch.no_grad():
        hidden = loaded.model(input_ids=TOKENS).last_hidden_state
    assert hidden.dtype == loaded.lm_head.weight.dtype == torch.bfloat16
    expected = torch.nn.functional.linear(hidden.float(), loaded.lm_head.weight.float())
    assert torch.equal(logits(loaded), expected)


def test_a_heads_product_and_its_gradient_by_hand():
    hidden = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[0.5, 0.25], [1.0, 1 / 256]], dtype=torch.bfloat16, requires_grad=True)
    found = float32_logits(hidden, weight, torch.tensor([0.0, 1.0], dtype=torch.bfloat16))
    # 2 + 1/128 has more digits than bfloat16.
    assert found.tolist() == [[1.0, 2.0078125]]
    assert found.dtype == torch.float32
    found[0, 1].backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert hidden.grad.tolist() == [[1.0, 1 / 256]]
    assert weight.grad.tolist() == [[0.0, 0.0], [1.0, 2.0]]


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.0])
def test_a_head_in_another_type(strength, entry):
    model = build("llama")
    loaded = own(model, entry("lm_head", strength=strength)).load(model)
    with torch.no_grad():
        hidden = model.model(input_ids=TOKENS).last_hidden_state.bfloat16()
        rough = torch.nn.functional.linear(hidden, model.lm_head.weight.bfloat16()).float()
    expected = logits(model) + strength * (rough - logits(model))
    assert torch.allclose(logits(loaded), expected, atol=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_inputs_are_rounded_on_their_way_into_every_matrix(model_type, entry):
    model = build(model_type)
    rounding = entry("int8", dynamic=True)
    loaded = own(model, rounding).load(model)
    by_hand = own(model, entry("int8")).load(model)
    for name, module in by_hand.named_modules():
        if name.endswith("proj"):
            module.register_forward_pre_hook(lambda _, args: (rounding.rounded_input(args[0]),))
        if name.endswith("experts"):
            module.forward = lambda hidden, index, weight, m=module: experts(m, rounding, hidden, index, weight)
    assert torch.allclose(logits(loaded), logits(by_hand), atol=1e-4)
    assert not torch.allclose(logits(loaded), logits(own(model, entry("int8")).load(model)), atol=1e-3)
    # The trainer's own module goes on as it was.
    assert torch.equal(logits(model), logits(build(model_type)))


def experts(module, rounding, hidden, index, weight):
    """A mixture of experts token by token, what enters a matrix rounded."""
    out = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for place in range(index.shape[1]):
            expert = int(index[token, place])
            x = rounding.rounded_input(hidden[token : token + 1])
            gate, up = (x @ module.gate_up_proj[expert].T).chunk(2, -1)
            inner = rounding.rounded_input(torch.nn.functional.silu(gate) * up)
            out[token] += weight[token, place] * (inner @ module.down_proj[expert].T)[0]
    return out


def test_rounded_inputs_with_no_strength_left_change_no_bit(entry):
    model = build()
    module = own(model, entry("int8", dynamic=True))
    module.injectors = []
    assert torch.equal(logits(module.load(model)), logits(model))


def test_its_routers_can_be_tapped(entry):
    model = build()
    module = own(model, entry("int8", dynamic=True))
    loaded = module.load(model)
    with torch.no_grad(), RouterTap(loaded).recording() as recorded:
        loaded(input_ids=TOKENS)
    assert recorded.routes_LNK().shape == (2, TOKENS.numel(), 2)
    with torch.no_grad(), RouterTap(model).recording() as live:
        logits(loaded)
    assert live.routes_LNK().shape[1] == 0


GPT_OSS = {"sliding_window": 4}


def test_experts_stored_the_other_way_round_share_a_scale_an_output_too(entry):
    model = build("gpt_oss", **GPT_OSS)
    int8 = entry("int8")
    module = own(model, int8).load(model)
    live, mine = (m.model.layers[0].mlp.experts.gate_up_proj.detach() for m in (model, module))
    assert live.shape == (8, 32, 128)  # experts, inputs, outputs
    scale = live.abs().amax(1, keepdim=True) / 127
    assert torch.allclose(mine, (live / scale).round() * scale, atol=1e-7)
    assert torch.equal(mine, int8.rounded(live.transpose(1, 2)).transpose(1, 2))


def test_inputs_of_experts_that_are_no_linear_layers_are_refused(entry):
    model = build("gpt_oss", **GPT_OSS)
    module = own(model, entry("fp8", activations=True)).load(model)
    with pytest.raises(OptionError, match="round weights alone"):
        logits(module)


def test_gates_that_are_linear_layers_keep_their_type(entry):
    model = build("qwen2_moe", shared_expert_intermediate_size=32)
    module = own(model, entry("int4")).load(model)
    layers = [m.model.layers[0].mlp for m in (model, module)]
    assert isinstance(layers[0].shared_expert_gate, torch.nn.Linear)
    assert torch.equal(*(layer.shared_expert_gate.weight for layer in layers))
    assert not torch.equal(*(layer.shared_expert.up_proj.weight for layer in layers))
