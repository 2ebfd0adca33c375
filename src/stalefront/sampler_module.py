"""A module of the sampler's own: the trainer's weights, rounded, cast, and with another head."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from stalefront.choice import OptionError
from stalefront.mismatch import Mismatch, Rounding
from stalefront.mismatch.lm_head import LMHead
from stalefront.model import clean_copy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Names of modules that decide about experts, of which some are linear layers.
GATES = ("gate", "router", "shared_expert_gate")


class SamplerModule:
    """Runs what `injectors` make of a model's weights.

    Attributes
    ----------
    injectors
        Entries that act now; may be set anew, and then takes effect with the next `load`.
    """

    def __init__(
        self, model: PreTrainedModel, injectors: Sequence[Mismatch], *, dtype: torch.dtype | None, float32_head: bool
    ) -> None:
        """`dtype` is the type of the parameters, None for the model's; buffers keep theirs, as when one is loaded."""
        self.injectors, self.float32_head = injectors, float32_head
        self.module = clean_copy(model)
        for parameter in self.module.parameters():
            parameter.data = parameter.data.to(dtype or parameter.dtype)
        self.head = self.module.get_output_embeddings()
        # Whether a matrix is stored as (…, in, out).
        self.matrices = {id(matrix): transposed for matrix, transposed in _matrices(self.module, self.head)}
        check_widths(self.module, self._rounding)
        self._head_weight: Tensor = self.head.weight
        self.head.forward = self._head
        # How experts are run while nothing that enters them is rounded; None where nothing ever is.
        self._experts: str | None = None
        if any(entry.rounds_inputs for entry in self._rounding):
            self._round_inputs()

    @property
    def _rounding(self) -> list[Rounding]:
        return [entry for entry in self.injectors if isinstance(entry, Rounding)]

    @torch.no_grad()
    def load(self, model: PreTrainedModel) -> PreTrainedModel:
        """The module with the weights of `model`, every matrix rounded."""
        if self._experts is not None:
            # The one implementation of experts whose products go through `linear`.
            rounds = any(entry.rounds_inputs for entry in self._rounding)
            self.module.set_experts_implementation("eager" if rounds else self._experts)
        for mine, live in zip(self.module.parameters(), model.parameters(), strict=True):
            if id(mine) not in self.matrices:
                mine.copy_(live)
            elif self.matrices[id(mine)]:
                mine.copy_(self._rounded(live.transpose(-2, -1)).transpose(-2, -1))
            else:
                mine.copy_(self._rounded(live))
        for kept, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            kept.copy_(buffer)
        # Apart from its parameter: an embedding tied to it stays as it is.
        self._head_weight = self._rounded(self.head.weight, head=True)
        return self.module

    def _rounded(self, weight: Tensor, *, head: bool = False) -> Tensor:
        for entry in self._rounding:
            if entry.head or not head:
                weight = entry.weight(weight)
        return weight

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits: float32 where the head is, with whatever entries make of its product."""
        for rounding in self._rounding:
            if rounding.head:
                hidden = rounding.entering(hidden)
        weight, bias = self._head_weight, self.head.bias
        product = float32_logits if self.float32_head else linear
        logits = product(hidden, weight, bias)
        for entry in self.injectors:
            if isinstance(entry, LMHead):
                logits = entry.logits(hidden, weight, bias, logits)
        return logits

    def _round_inputs(self) -> None:
        """Let every linear layer and every expert round what enters it."""
        # A copy shares the live model's configuration, and the trainer's experts go on as they were.
        copied: dict[int, Any] = {}
        for module in self.module.modules():
            if hasattr(module, "config"):
                module.config = copy.deepcopy(module.config, copied)
            if self._is_linear(module):
                module.forward = functools.partial(self._linear, module)
            elif any(id(p) in self.matrices for p in module.parameters(recurse=False) if p.dim() == 3):
                module.forward = functools.partial(_under, _Entering(self), module.forward)
        self._experts = self.module.config._experts_implementation

    def _is_linear(self, module: torch.nn.Module) -> bool:
        """A linear layer whose matrix is rounded, other than the head."""
        return isinstance(module, torch.nn.Linear) and module is not self.head and id(module.weight) in self.matrices

    def _linear(self, module: torch.nn.Linear, x: Tensor) -> Tensor:
        return linear(self.entering(x), module.weight, module.bias)

    def entering(self, x: Tensor) -> Tensor:
        """What a matrix gets for `x`."""
        for entry in self._rounding:
            x = entry.entering(x)
        return x


class _Entering(TorchFunctionMode):
    """Rounds the input of every `linear` inside."""

    def __init__(self, owner: SamplerModule) -> None:
        super().__init__()
        self.owner = owner
        self.products = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is linear:
            self.products += 1
            args = (self.owner.entering(args[0]), *args[1:])
        return function(*args, **(kwargs or {}))


def _under(mode: _Entering, forward: Any, *args: Any, **kwargs: Any) -> Any:
    mode.products = 0
    with mode:
        out = forward(*args, **kwargs)
    if not mode.products and any(entry.rounds_inputs for entry in mode.owner.injectors if isinstance(entry, Rounding)):
        raise OptionError(
            "mismatch",
            [entry.choice() for entry in mode.owner.injectors],
            "entries that round weights alone, for a family whose experts do not multiply through linear layers",
            "Their inputs cannot be rounded: leave out activations or dynamic.",
        )
    return out


def check_widths(model: PreTrainedModel, entries: Sequence[Rounding]) -> None:
    """Raise `OptionError` where an entry cannot round some matrix of `model`; works on the meta device."""
    transposed = {id(matrix): turned for matrix, turned in _matrices(model, model.get_output_embeddings())}
    for name, parameter in model.named_parameters():
        if id(parameter) in transposed:
            width = parameter.shape[-2 if transposed[id(parameter)] else -1]
            for entry in entries:
                entry.check_width(name, width)


def _matrices(model: PreTrainedModel, head: torch.nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """Weights that engines quantise, and whether they lie as (…, in, out) instead of (…, out, in).

    Those of linear layers but the head, and of experts; no gates, no embeddings.
    """
    from stalefront.routing import RoutingError, find_routers

    try:
        gates = {id(p) for router in find_routers(model) for p in router.parameters()}
    except RoutingError:
        gates = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.conv._ConvNd) or name.rpartition(".")[2] in GATES:
            continue
        for parameter in module.parameters(recurse=False):
            is_matrix = isinstance(module, torch.nn.Linear) and parameter is module.weight and module is not head
            if (is_matrix or parameter.dim() == 3) and id(parameter) not in gates:
                yield parameter, bool(getattr(module, "is_transposed", False))


def float32_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The head's product in float32, whatever the types of its factors; gradients come in theirs."""
    return linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def float32_head(model: PreTrainedModel) -> None:
    """Make the head of `model` compute in float32; its parameters keep their type, and ties to embeddings hold."""
    head = model.get_output_embeddings()
    head.forward = lambda hidden: float32_logits(hidden, head.weight, head.bias)
