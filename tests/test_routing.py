"""Record, replay and change: a router by hand, contexts that combine, and everything that is refused."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stalefront.model import clean_copy
from stalefront.routing import RouterTap, RoutingError, find_routers

SIZES = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16, "initializer_range": 0.2},
    **{"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 64},
}
TOKENS = torch.randint(32, (3, 4), generator=torch.Generator().manual_seed(0))


def build(model_type: str = "qwen3_moe", **more: Any) -> Any:
    how = {"experts_implementation": more.pop("experts_implementation", "eager")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **SIZES | more)
        return AutoModelForCausalLM.from_config(config, **how).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


@pytest.fixture(scope="module")
def tap(model) -> RouterTap:
    return RouterTap(model)


def random_routes(seed: int = 0) -> Tensor:
    order = torch.rand(2, *TOKENS.shape, 8, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[..., :2].to(torch.int16)


def recorded_routes(model: Any, tap: RouterTap) -> Tensor:
    with torch.no_grad(), tap.recording() as recorded:
        model(input_ids=TOKENS)
    return recorded.routes_LNK().view(2, *TOKENS.shape, 2)


# A router by hand.


def test_weights_and_their_gradient_by_hand():
    model = build(hidden_size=8, num_experts=3, num_hidden_layers=1)
    tap = RouterTap(model)
    router = find_routers(model)[0]
    with torch.no_grad():
        router.weight.copy_(torch.eye(3, 8))
    logits = torch.tensor([[0.0, 2.0, 5.0]]).log().nan_to_num(neginf=0.0)
    hidden = torch.nn.functional.pad(logits, (0, 5)).requires_grad_()
    with tap.replaying(torch.tensor([[[[1, 0]]]], dtype=torch.int16)) as replayed:
        _, weights, indices = router(hidden)
    # Probabilities 1/8, 2/8, 5/8; of experts 1 and 0 renormalised 2/3 and 1/3, where the router itself takes 2 and 1.
    assert indices.tolist() == [[1, 0]]
    assert weights.tolist() == [pytest.approx([2 / 3, 1 / 3])]
    assert replayed.own_LBTK.tolist() == [[[[2, 1]]]]
    weights[0, 0].backward()
    # w (1 − w) for its own logit, −w₀ w₁ for the other chosen one, nothing for the expert left out.
    assert hidden.grad[0, :3].tolist() == pytest.approx([-2 / 9, 2 / 9, 0.0], abs=1e-7)


# Contexts.


@dataclass(frozen=True)
class Towards:
    """Adds to the gate logits of one expert."""

    expert: int
    by: float = 1e3

    def logits(self, logits_NE: Tensor, layer: int) -> Tensor:
        return logits_NE + self.by * torch.nn.functional.one_hot(torch.tensor(self.expert), 8)

    def choose(self, scores_NE: Tensor, own_NK: Tensor, layer: int) -> Tensor:
        return own_NK


@dataclass(frozen=True)
class Next:
    """Takes the expert after each one chosen, and keeps what it was given."""

    seen: list[tuple[int, Tensor, Tensor]]

    def logits(self, logits_NE: Tensor, layer: int) -> Tensor:
        return logits_NE

    def choose(self, scores_NE: Tensor, own_NK: Tensor, layer: int) -> Tensor:
        self.seen.append((layer, scores_NE, own_NK))
        return (own_NK + 1) % 8


def test_nothing_active_changes_no_bit_and_is_no_part_of_the_state():
    plain, other = build(), build()
    before = plain(input_ids=TOKENS).logits
    names = list(other.state_dict())
    tap = RouterTap(other)
    with tap.recording():
        assert torch.equal(other(input_ids=TOKENS).logits, before)
    assert torch.equal(other(input_ids=TOKENS).logits, before)
    assert list(other.state_dict()) == names
    other.load_state_dict(plain.state_dict())


def test_logits_change_before_the_familys_own_maths(model, tap):
    with torch.no_grad(), tap.changing(Towards(3)), tap.recording() as recorded:
        out = model(input_ids=TOKENS, output_router_logits=True)
    assert (recorded.routes_LNK() == 3).any(-1).all()
    assert all(bool((logits[:, 3] > 500).all()) for logits in out.router_logits)
    assert not (recorded_routes(model, tap) == 3).any(-1).all()


def test_the_order_inside_a_router(model, tap):
    """Logits, selection, choice, replay, record: a route stands above a change, and the own choice shows it."""
    routes = random_routes()
    routes[:, 0] = -1
    change = Next([])
    changed = (tap.changing(Towards(3, by=8.0)), tap.changing(change))
    with torch.no_grad(), tap.recording() as recorded, changed[0], changed[1], tap.replaying(routes) as replayed:
        model(input_ids=TOKENS)
    used = recorded.routes_LNK().view_as(routes)
    assert torch.equal(used[:, 1:], routes[:, 1:])
    assert torch.equal(used[:, :1], replayed.own_LBTK[:, :1])
    assert [layer for layer, _, _ in change.seen] == [0, 1]
    for layer, scores_NE, own_NK in change.seen:
        assert torch.equal(own_NK, scores_NE.topk(2, dim=-1).indices)
        assert (own_NK == 3).any(-1).all()
        assert torch.equal(replayed.own_LBTK[layer].flatten(0, 1), ((own_NK + 1) % 8).to(torch.int16))


def test_changes_follow_one_another_and_end_with_their_context(model, tap):
    first, second = Next([]), Next([])
    with torch.no_grad(), tap.recording() as recorded:
        with tap.changing(first), tap.changing(second):
            model(input_ids=TOKENS)
        with tap.changing(first):
            model(input_ids=TOKENS)
    assert torch.equal(second.seen[0][2], (first.seen[0][2] + 1) % 8)
    assert len(second.seen) == 2
    once, twice = recorded.calls()[1][0], recorded.calls()[0][0]
    assert torch.equal((once + 1) % 8, twice)


def test_a_change_may_stay_and_acts_before_the_others():
    model, plain = build(), build()
    tap, stays, passes = RouterTap(model), Next([]), Next([])
    with torch.no_grad():
        with tap.changing(passes):
            tap.always(stays)
            model(input_ids=TOKENS)
        assert torch.equal(passes.seen[0][2], (stays.seen[0][2] + 1) % 8)
        assert not torch.equal(model(input_ids=TOKENS).logits, plain(input_ids=TOKENS).logits)
        assert len(stays.seen) == 2 * len(passes.seen) == 4
        assert torch.equal(clean_copy(model)(input_ids=TOKENS).logits, plain(input_ids=TOKENS).logits)


def test_a_choice_is_weighed_by_its_own_scores(model, tap):
    """What `choose` takes runs as if it had been recorded and replayed."""
    with torch.no_grad(), tap.changing(Next([])), tap.recording() as recorded:
        changed = model(input_ids=TOKENS).logits
    with torch.no_grad(), tap.replaying(recorded.routes_LNK().view(2, *TOKENS.shape, 2)):
        assert torch.equal(model(input_ids=TOKENS).logits, changed)


def test_forwards_are_recorded_one_after_the_other(model, tap):
    with torch.no_grad(), tap.recording() as outer:
        model(input_ids=TOKENS)
        with tap.recording() as inner:
            model(input_ids=TOKENS[:1])
    assert [call.shape for call in outer.calls()] == [(2, 12, 2), (2, 4, 2)]
    assert outer.routes_LNK().dtype == torch.int16
    assert torch.equal(outer.routes_LNK()[:, 12:], inner.routes_LNK())
    with tap.recording() as empty:
        pass
    assert empty.routes_LNK().shape == (2, 0, 2)


def test_what_a_tap_does_ends_with_an_exception(model, tap):
    before = model(input_ids=TOKENS).logits
    with pytest.raises(KeyError), tap.recording(), tap.changing(Next([])), tap.replaying(random_routes()):
        raise KeyError
    assert torch.equal(model(input_ids=TOKENS).logits, before)
    with tap.replaying(random_routes()):
        model(input_ids=TOKENS)


def test_copies_of_a_model_have_their_own_routers(model, tap):
    fresh, deep = clean_copy(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in [*fresh.parameters(), *deep.parameters()]:
            parameter.mul_(-1.5)
        expected = build().eval()
        expected.load_state_dict(fresh.state_dict())
        with tap.replaying(random_routes()), tap.recording() as recorded:
            assert torch.equal(fresh(input_ids=TOKENS).logits, expected(input_ids=TOKENS).logits)
            assert torch.equal(deep(input_ids=TOKENS).logits, expected(input_ids=TOKENS).logits)
            assert recorded.calls() == []
            model(input_ids=TOKENS)
    assert all("forward" not in router.__dict__ for router in find_routers(fresh))
    for other in (fresh, deep):
        with torch.no_grad(), RouterTap(other).replaying(random_routes()), tap.recording() as recorded:
            other(input_ids=TOKENS)
        assert recorded.calls() == []


def test_a_copy_made_inside_a_context_is_outside_of_it():
    model, plain = build(), build()
    tap = RouterTap(model)
    with tap.replaying(random_routes()), torch.no_grad():
        deep = copy.deepcopy(model)
        model(input_ids=TOKENS)
        assert torch.equal(deep(input_ids=TOKENS).logits, plain(input_ids=TOKENS).logits)
    tap.always(Towards(3, by=8.0))
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


def test_two_taps_of_a_model_are_one(model, tap):
    with torch.no_grad(), tap.recording() as recorded:
        second = RouterTap(model)
        assert find_routers(model)
        with second.replaying(random_routes()):
            model(input_ids=TOKENS)
    assert torch.equal(recorded.routes_LNK().view(2, *TOKENS.shape, 2), random_routes())


@pytest.mark.parametrize("experts_implementation", ["eager", "batched_mm", "grouped_mm"])
def test_a_backward_outside_is_loud_whatever_multiplies_the_experts(experts_implementation):
    model = build(experts_implementation=experts_implementation)
    tap = RouterTap(model)
    model.train().activation_checkpointing_enable()
    with tap.replaying(random_routes()):
        loss = model(input_ids=TOKENS).logits.sum()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        loss.backward()


def test_a_single_layer_is_not_recorded_twice_by_a_backward():
    model = build(num_hidden_layers=1)
    tap = RouterTap(model)
    model.train().activation_checkpointing_enable()
    with tap.recording() as recorded:
        model(input_ids=TOKENS).logits.sum().backward()
        model(input_ids=TOKENS)
    assert [call.shape for call in recorded.calls()] == [(1, 12, 2)] * 2


# What is refused.


def unknown_in_one_place() -> Tensor:
    routes = random_routes()
    routes[0, 0, 0, 1] = -1
    return routes


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (random_routes().long(), r"torch\.int64.*int16"),
        (random_routes()[0], r"shape \(3, 4, 2\).*\(2, B, T, 2\)"),
        (random_routes()[:1], r"shape \(1, 3, 4, 2\)"),
        (random_routes()[..., :1], r"shape \(2, 3, 4, 1\)"),
        (torch.full((2, 3, 4, 2), 8, dtype=torch.int16), "from 0 to 7"),
        (torch.full((2, 3, 4, 2), -2, dtype=torch.int16), "from 0 to 7"),
        (unknown_in_one_place(), "−1 in all 2 places"),
        (torch.zeros(2, 3, 4, 2, dtype=torch.int16), "twice"),
    ],
)
def test_routes_that_do_not_fit_are_refused(tap, routes, message):
    with pytest.raises(RoutingError, match=message), tap.replaying(routes):
        pass


def test_a_forward_of_other_tokens_is_refused(model, tap):
    with pytest.raises(RoutingError, match=r"8 tokens meets routes of 3 × 4 = 12"), tap.replaying(random_routes()):
        model(input_ids=TOKENS[:2])
    with tap.replaying(random_routes()) as replayed:
        with pytest.raises(RoutingError, match="no whole forward"):
            _ = replayed.own_LBTK
        model(input_ids=TOKENS)
    with pytest.raises(RoutingError, match="already"), tap.replaying(random_routes()), tap.replaying(random_routes()):
        pass


def test_a_treatment_that_never_acted_is_refused(model, tap):
    unused = tap.replaying(random_routes())
    with pytest.raises(RoutingError, match="no router ran while routes were to be replayed"), unused:
        pass
    with pytest.raises(RoutingError, match="no router ran while routes were to be changed"), tap.changing(Next([])):
        clean_copy(model)(input_ids=TOKENS)


@dataclass(frozen=True)
class Wrong:
    """A change that gives what it must not."""

    what: str

    def logits(self, logits_NE: Tensor, layer: int) -> Tensor:
        return {"type": logits_NE.double(), "shape": logits_NE[:1]}.get(self.what, logits_NE)

    def choose(self, scores_NE: Tensor, own_NK: Tensor, layer: int) -> Tensor:
        return {"narrow": own_NK[:, :1], "int16": own_NK.to(torch.int16)}.get(self.what, own_NK)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("type", r"Wrong\.logits gave torch\.float64 \(12, 8\); legal: torch\.float32"),
        ("shape", r"Wrong\.logits gave torch\.float32 \(1, 8\)"),
        ("narrow", r"Wrong\.choose gave torch\.int64 \(12, 1\); legal: torch\.int64 \(12, 2\)"),
        ("int16", r"Wrong\.choose gave torch\.int16"),
    ],
)
def test_changes_of_another_form_are_refused(model, tap, what, message):
    with pytest.raises(RoutingError, match=message), tap.changing(Wrong(what)):
        model(input_ids=TOKENS)


def rerouted(forward: Any, fault: str) -> Any:
    def run(hidden: Tensor) -> Any:
        logits, weights, indices = forward(hidden)
        if fault == "twice":
            logits.topk(2, dim=-1)
        return logits, weights, indices.flip(-1) if fault == "other" else indices

    return run


@pytest.mark.parametrize(("fault", "message"), [("twice", "2 times"), ("other", "other experts than it was told")])
def test_a_router_that_goes_astray_is_caught_in_its_forward(fault, message):
    model = build()
    tap = RouterTap(model)
    forward = find_routers(model)[1].forward
    forward.own = rerouted(forward.own, fault)
    model(input_ids=TOKENS)
    with pytest.raises(RoutingError, match=f"router 1 .*{message}"), tap.recording():
        model(input_ids=TOKENS)


def test_a_forward_that_was_replaced_by_others_is_refused():
    model = build()
    router = find_routers(model)[0]
    router.forward = rerouted(router.forward, "none")
    with pytest.raises(RoutingError, match="something else has replaced"):
        RouterTap(model)


def test_a_recording_of_parts_of_a_forward_is_refused(model, tap):
    router = find_routers(model)[1]
    with pytest.raises(RoutingError, match="router 1 ran where router 0 was due"), tap.recording():
        router(torch.zeros(1, 16))
    with tap.recording() as recorded:
        find_routers(model)[0](torch.zeros(1, 16))
    with pytest.raises(RoutingError, match="stopped after 1 of 2 routers"):
        recorded.routes_LNK()
