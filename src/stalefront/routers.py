"""Routers of mixture-of-experts models in transformers: found, probed, and watched while they choose.

A router that can be recorded and replayed is a module of its own. It takes the hidden states of N tokens, computes E
gate logits a token by one matrix product, selects K experts by one top-k over E scores, and returns (logits, weights,
indices). What lies between differs between families (softmax or sigmoid, over all experts or the chosen ones, groups,
biases, normalisation) and stays their own code: only the product and the selection are met on the way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens of a probe: more than one, so that rows that trade places show.
PROBE_TOKENS = 5
# Largest number of experts whose indices fit what routes are stored in.
MOST_EXPERTS = torch.iinfo(torch.int16).max + 1


class RoutingError(ValueError):
    """A model whose routing cannot be recorded or replayed, or routes that do not fit it."""


class Router(NamedTuple):
    """A router module with its sizes, E experts of which K are chosen a token."""

    module: torch.nn.Module
    experts: int
    top_k: int


class Watch(TorchFunctionMode):
    """Meets, inside one router's forward, the product that gives the gate logits and the top-k that selects.

    Attributes
    ----------
    gates, selections : int
        How many of them were met. Of products with E outputs the first is the gate.
    chosen_NK : int64 or None
        What the selection returned to the router.
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        *,
        logits: Callable[[Tensor], Tensor] | None = None,
        choose: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """`logits` maps the gate logits to others, `choose` maps the scores and the own choice to the one to take."""
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.logits, self.choose = logits, choose
        self.gates = self.selections = 0
        self.chosen_NK: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and not self.gates and out.shape[-1] == self.experts:
            self.gates = 1
            return out if self.logits is None else self.logits(out)
        if func in (torch.topk, torch.Tensor.topk):
            return self._select(out, *args, **(kwargs or {}))
        return out

    def _select(self, out: Any, input: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        # DeepSeek's choice of groups is a top-k too: of a 3-D tensor, then of one that has groups and not experts last.
        if input.dim() != 2 or dim not in (-1, 1) or input.shape[-1] != self.experts or k != self.top_k:
            return out
        self.selections += 1
        self.chosen_NK = out.indices
        if self.choose is None:
            return out
        self.chosen_NK = self.choose(input, out.indices)
        # The gather is there even where the choice is the own one: a recomputation without it is told apart.
        return type(out)((input.gather(-1, self.chosen_NK), self.chosen_NK))


def find_routers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Router modules of a model, in order of depth; also of a model on the meta device.

    Raises
    ------
    RoutingError
        For a dense model, and for a family whose routers are of another kind.
    """
    return [router.module for router in routers_of(model)]


def routers_of(model: PreTrainedModel) -> list[Router]:
    """Routers in order of depth with their sizes, the same in all layers; every one is run once on a small input."""
    kinds = tuple(_declared(model))
    modules = [module for module in model.modules() if kinds and isinstance(module, kinds)]
    if not modules:
        raise refusal(model, "transformers declares no routers for it: it is dense, or routes in a way of its own")
    found = [probe(model, module) for module in modules]
    sizes = {(router.experts, router.top_k) for router in found}
    if len(sizes) > 1:
        raise refusal(model, f"its layers differ in (experts, experts a token): {sorted(sizes)}")
    if found[0].experts > MOST_EXPERTS:
        raise refusal(model, f"it has {found[0].experts} experts, and routes are stored as int16")
    return found


def refusal(model: PreTrainedModel, reason: str) -> RoutingError:
    """The error of a model: its type, what is in the way, and the way out."""
    return RoutingError(
        f"routing of model_type {model.config.model_type!r} cannot be recorded or replayed: {reason}. "
        "Leave routing replay and changes of routing off for it (docs/routing.md says what is supported)."
    )


def _declared(model: PreTrainedModel) -> Iterator[type[torch.nn.Module]]:
    """Classes that give `router_logits` by what the classes of the model and of its parts declare."""
    for kind in {type(module) for module in model.modules()}:
        declared = (getattr(kind, "_can_record_outputs", None) or {}).get("router_logits", [])
        recorders: list[Any] = declared if isinstance(declared, list) else [declared]
        for recorder in recorders:
            target: Any = getattr(recorder, "target_class", recorder)
            yield target


def probe(model: PreTrainedModel, module: torch.nn.Module) -> Router:
    """Sizes of a router, from a run on random hidden states; on a real device a random forced choice must be honoured.

    Forced experts must come back as the indices, and their weights in the order they were forced in, so that a router
    whose weights come from elsewhere than the selection is refused.
    """
    weight = next((parameter for parameter in module.parameters() if parameter.dim() == 2), None)
    if weight is None:
        raise refusal(model, f"{_name(module)} has no gate of its own")
    experts = weight.shape[0]
    inputs = _probe_inputs(model, module, weight)
    # K is read off what comes out, so that no family's attribute is asked for.
    logits, _, own_NK = _probe_run(model, module, inputs)
    if own_NK.dim() != 2 or own_NK.is_floating_point() or logits.shape[-1] != experts:
        raise refusal(model, f"{_name(module)} returns no (logits, weights, indices) of {experts} experts")
    router = Router(module, experts, own_NK.shape[1])
    watch = Watch(experts, router.top_k)
    _probe_run(model, module, inputs, watch)
    if watch.selections != 1:
        raise refusal(model, f"{_name(module)} does not select by one top-k over its {experts} scores")
    if not own_NK.is_meta:
        _probe_forced(model, router, inputs)
    return router


def _probe_inputs(model: PreTrainedModel, module: torch.nn.Module, weight: Tensor) -> list[Tensor]:
    """Hidden states of a few tokens, and zeros for every bias that the router's caller hands it."""
    asked = [
        parameter.name
        for parameter in list(inspect.signature(type(module).forward).parameters.values())[2:]
        if parameter.default in (None, parameter.empty) and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if not all("bias" in name for name in asked):
        raise refusal(model, f"{_name(module)} asks for {', '.join(asked)} beside hidden states")
    random = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(PROBE_TOKENS, weight.shape[1], generator=random).to(weight)
    return [hidden_NH, *(hidden_NH.new_zeros(weight.shape[0]) for _ in asked)]


def _probe_run(
    model: PreTrainedModel, module: torch.nn.Module, inputs: list[Tensor], watch: Watch | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    # A tap that is there already must not take the probe for tokens.
    forward = getattr(module.forward, "own", module.forward)
    try:
        with torch.no_grad(), watch or nullcontext():
            out = forward(*inputs)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise refusal(model, f"{_name(module)} does not run on the hidden states of a few tokens ({error})") from error
    if not isinstance(out, tuple) or len(out) != 3 or not all(isinstance(part, Tensor) for part in out):
        got = f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__
        raise refusal(model, f"{_name(module)} returns {got}, not (logits, weights, indices)")
    return out


def _probe_forced(model: PreTrainedModel, router: Router, inputs: list[Tensor]) -> None:
    random = torch.Generator().manual_seed(1)
    order_NE = torch.rand(PROBE_TOKENS, router.experts, generator=random).argsort(-1)
    forced_NK = order_NE[:, : router.top_k].to(inputs[0].device)
    found = []
    for choice_NK in (forced_NK, forced_NK.flip(-1)):
        watch = Watch(router.experts, router.top_k, choose=_always(choice_NK))
        _, weights_NK, indices_NK = _probe_run(model, router.module, inputs, watch)
        if not torch.equal(indices_NK, choice_NK):
            raise refusal(model, f"{_name(router.module)} does not return the experts that were forced on it")
        found.append(weights_NK)
    if not torch.allclose(found[0], found[1].flip(-1), rtol=1e-3, atol=1e-6):
        raise refusal(model, f"{_name(router.module)} weighs experts by something else than their own scores")


def _always(choice_NK: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda scores_NE, own_NK: choice_NK


def _name(module: torch.nn.Module) -> str:
    return type(module).__name__
