"""FP8: matrices against the table of all E4M3 numbers, what stays as it is, and activations on hooked layers."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from stalefront.rounding import fp8_e4m3

TABLE = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
TABLE = TABLE[TABLE.isfinite()].unique()
ACTIVE = {"mismatch.fp8.activations": True}


def nearest(value):
    """Neighbour in the table; where two are as near, either will do."""
    return (value.double()[..., None] - TABLE).abs().min(-1).values


def test_values_by_hand(entry):
    # Between 16 and 32 the numbers are 2 apart, and the largest of each channel is 448.
    weight = torch.tensor([[448.0, 17.5, 21.0], [4.48, 0.175, 0.21]])
    expected = torch.tensor([[448.0, 18.0, 20.0], [4.48, 0.18, 0.20]])
    torch.testing.assert_close(entry("fp8").weight(weight), expected, rtol=1e-6, atol=0)
    half = torch.tensor([[448.0, 17.75, 20.5], [4.48, 0.1775, 0.205]])
    torch.testing.assert_close(entry("fp8", strength=0.5).weight(weight), half, rtol=1e-6, atol=0)
    # One scale for all: the second row is 0.175, which the table has as 0.171875.
    whole = entry("fp8", scale="tensor").weight(weight)
    assert whole[1].tolist() == [4.5, 0.171875, 0.203125]


@pytest.mark.parametrize("scale", ["channel", "tensor"])
def test_every_matrix_holds_the_nearest_numbers_of_the_format(scale, make_learner, moved):
    found = moved(make_learner("fp8", **{"mismatch.fp8.scale": scale}))
    assert {name.rsplit(".", 2)[1] for name in found} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    }
    for live, mine in found.values():
        largest = live.abs().amax(-1, keepdim=True) if scale == "channel" else live.abs().max()
        step = (largest / 448).double()
        assert nearest(mine / step).max() < 1e-4
        error = ((live - mine) / step).abs()
        assert (error <= nearest(live / step) + 1e-4).all()


def test_experts_are_rounded_one_by_one_and_gates_are_not(make_learner, moved):
    found = moved(make_learner("fp8", model="tiny_moe"))
    names = {name.split("layers.0.")[1] for name in found if "layers.0." in name}
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert names == {*experts, *(f"self_attn.{name}_proj.weight" for name in "qkvo")}
    for name in experts:
        live, mine = found[f"model.layers.0.{name}"]
        for expert in range(8):
            assert torch.equal(mine[expert], fp8_e4m3(live[expert], "channel"))


def test_biases_and_the_head_stay(make_learner, make_config, moved, loaded):
    biased = make_config()["model"]["config"] | {"attention_bias": True}
    made = make_learner("fp8", **{"model.config": biased})
    with torch.no_grad():
        for name, parameter in made.parts.model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(generator=torch.Generator().manual_seed(0))
    assert all(name.endswith("_proj.weight") for name in moved(made))
    hidden = torch.ones(1, 32)
    assert torch.equal(loaded(made).lm_head(hidden), made.parts.model.lm_head(hidden))


def test_the_head_where_asked(make_learner, loaded):
    made = make_learner("fp8", **{"mismatch.fp8.head": True}, **ACTIVE)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    weight = made.parts.model.lm_head.weight
    expected = linear(fp8_e4m3(hidden, "channel"), fp8_e4m3(weight, "channel"))
    assert torch.equal(loaded(made).lm_head(hidden), expected)
    assert torch.equal(loaded(made).lm_head.weight, weight)


def hooked(model, module):
    """What a module got and gave in one forward."""
    seen = []
    handle = module.register_forward_hook(lambda _, given, out: seen.append((given, out)))
    with torch.no_grad():
        model(input_ids=torch.tensor([[2, 3, 4, 5, 6]]))
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_what_enters_a_layer_is_rounded_token_by_token(strength, make_learner, loaded):
    made = make_learner("fp8", **ACTIVE, **{"mismatch.fp8.strength": strength})
    model = loaded(made)
    for module in (model.model.layers[0].self_attn.q_proj, model.model.layers[1].mlp.down_proj):
        (given,), out = hooked(model, module)
        rounded = given + strength * (fp8_e4m3(given, "channel") - given)
        torch.testing.assert_close(out, linear(rounded, module.weight), rtol=0, atol=1e-6)
        assert not torch.allclose(out, linear(given, module.weight), rtol=0, atol=1e-6)


def test_what_enters_an_expert_is_rounded_before_both_products(make_learner, loaded):
    made = make_learner("fp8", model="tiny_moe", **ACTIVE)
    model = loaded(made)
    experts = model.model.layers[0].mlp.experts
    (hidden, chosen, weights), out = hooked(model, experts)
    expected = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up = linear(fp8_e4m3(hidden[token], "channel"), experts.gate_up_proj[expert]).chunk(2)
            inner = fp8_e4m3(silu(gate) * up, "channel")
            expected[token] += weight * linear(inner, experts.down_proj[expert])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_nothing_is_rounded_on_the_way_without_activations(make_learner, loaded):
    model = loaded(make_learner("fp8"))
    module = model.model.layers[0].self_attn.q_proj
    (given,), out = hooked(model, module)
    assert torch.equal(out, linear(given, module.weight))


def test_options(refused):
    refused("fp8", "scale", scale="row")
