"""Routes of mixture-of-experts models: which experts every token takes, recorded, replayed and changed.

Notation: L layers with experts, E experts, K of them a token, N tokens of one forward, B sequences, T positions. Routes
are int16 indices of experts; −1 in all K places of a token means that its route is not known, and the router's own
choice stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from stalefront.routers import RoutingError, Watch, find_routers, refusal, routers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stalefront.routers import Router

__all__ = [
    "Recorded",
    "Replayed",
    "RouterChange",
    "RouterTap",
    "RoutingError",
    "find_routers",
    "flips_LBT",
    "route_bytes_per_token",
    "stable_topk",
    "token_hash_B",
]

UNKNOWN = -1
# Odd multipliers and shifts of splitmix64's finaliser (Steele, Lea and Flood 2014), as signed 64-bit numbers.
TOKEN, PLACE = 0x9E3779B97F4A7C15 - 2**64, 0xD1B54A32D192ED03 - 2**64
MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def stable_topk(scores_NE: Tensor, k: int) -> Tensor:
    """Indices of the k largest scores, largest first; of equal scores the lowest index comes first.

    `torch.topk` leaves the order of ties open, and its answer changes with device and shape. NaN counts as larger than
    any number, as it does there.
    """
    return torch.sort(scores_NE, dim=-1, descending=True, stable=True).indices[..., :k]


def flips_LBT(a_LBTK: Tensor, b_LBTK: Tensor) -> Tensor:
    """Where two routes take different SETS of experts; False where either is not known (−1)."""
    known = (a_LBTK != UNKNOWN).all(-1) & (b_LBTK != UNKNOWN).all(-1)
    return (a_LBTK.sort(-1).values != b_LBTK.sort(-1).values).any(-1) & known


def token_hash_B(tokens_BT: Tensor, mask: Tensor | None = None) -> Tensor:
    """Hash of a row's token ids and of the columns they stand in, to tell whether routes belong to their tokens.

    h = Σ_t m_t · mix((x_t + 1) · a + (t + 1) · b) modulo 2⁶⁴, with splitmix64's mix: z ^= z ≫ 30, z *= c, z ^= z ≫ 27,
    z *= d, z ^= z ≫ 31.

    Parameters
    ----------
    tokens_BT : integer (B, T)
    mask : bool (B, T) or None
        Tokens that count (None: all). What is appended to a row off the mask changes nothing; a row that is shifted has
        another hash, since its routes would not fit either.

    Returns
    -------
    int64 (B,)
    """
    place_T = torch.arange(1, tokens_BT.shape[1] + 1, device=tokens_BT.device)
    mixed_BT = (tokens_BT.long() + 1) * TOKEN + place_T * PLACE
    for shift, multiplier in MIXING:
        mixed_BT = (mixed_BT ^ _shifted(mixed_BT, shift)) * multiplier
    mixed_BT = mixed_BT ^ _shifted(mixed_BT, 31)
    return (mixed_BT if mask is None else mixed_BT * mask).sum(-1)


def _shifted(value: Tensor, by: int) -> Tensor:
    # int64 shifts copy the sign; the bits that come in must be 0.
    return (value >> by) & ((1 << (64 - by)) - 1)


def route_bytes_per_token(layers: int, top_k: int) -> int:
    """Bytes that the route of one token takes: 2 · L · K (int16)."""
    return torch.int16.itemsize * layers * top_k


class RouterChange(Protocol):
    """What makes a router choose otherwise; both are called once a layer and forward.

    With gradient checkpointing a layer runs again in the backward pass, and must see the same change then.
    """

    def logits(self, logits_NE: Tensor, layer: int) -> Tensor:
        """Gate logits to take instead, before the family's own maths; same shape and type."""

    def choose(self, scores_NE: Tensor, own_NK: Tensor, layer: int) -> Tensor:
        """Experts to take instead of the K own ones (int64), which are the largest of `scores_NE`."""


class Recorded:
    """Routes of every token fed, forward by forward; those of a recomputation in a backward pass are no second ones."""

    def __init__(self, layers: int, top_k: int) -> None:
        self.layers, self.top_k = layers, top_k
        self._calls: list[list[Tensor]] = []

    def calls(self) -> list[Tensor]:
        """Routes of each forward, int16 (L, N, K), rows in the order of the tokens (row-major for B × T)."""
        if self._calls and len(self._calls[-1]) != self.layers:
            raise RoutingError(f"the last forward stopped after {len(self._calls[-1])} of {self.layers} routers")
        return [torch.stack(call) for call in self._calls]

    def routes_LNK(self) -> Tensor:
        """Routes of all tokens, int16 (L, N, K), one forward after the other."""
        calls = self.calls()
        return torch.cat(calls, 1) if calls else torch.empty(self.layers, 0, self.top_k, dtype=torch.int16)

    def add(self, indices_NK: Tensor, layer: int) -> None:
        """What a layer took; layers come in order of depth, and layer 0 begins a forward."""
        if layer == 0 and (not self._calls or len(self._calls[-1]) == self.layers):
            self._calls.append([])
        due = len(self._calls[-1]) if self._calls else 0
        if layer != due:
            raise RoutingError(
                f"router {layer} ran where router {due} was due: layers must run once each, in order of depth. "
                "Record one whole forward after the other, and none that a backward pass repeats."
            )
        self._calls[-1].append(indices_NK.detach().to(torch.int16))


class Replayed:
    """Routes that are forced on a model, and what its routers would have chosen themselves."""

    def __init__(self, routes_LBTK: Tensor, layers: int, experts: int, top_k: int) -> None:
        self.routes_LBTK = routes_LBTK
        self._own: list[Tensor | None] = [None] * layers
        self._check(layers, experts, top_k)

    def _check(self, layers: int, experts: int, top_k: int) -> None:
        routes = self.routes_LBTK
        shape = tuple(routes.shape)
        if routes.dtype != torch.int16 or len(shape) != 4 or (shape[0], shape[-1]) != (layers, top_k):
            raise RoutingError(f"routes are {routes.dtype} of shape {shape}; legal: int16 of ({layers}, B, T, {top_k})")
        known = routes != UNKNOWN
        mixed = bool((known.any(-1) != known.all(-1)).any())
        if mixed or bool(((routes < UNKNOWN) | (routes >= experts)).any()):
            raise RoutingError(f"routes hold indices from 0 to {experts - 1}, or −1 in all {top_k} places of a token")
        ordered = routes.sort(-1).values
        if bool(((ordered[..., 1:] == ordered[..., :-1]) & known[..., 1:]).any()):
            raise RoutingError("routes name an expert twice for one token: they are no choice of a top-k")

    @property
    def own_LBTK(self) -> Tensor:
        """What the routers would have chosen in the last forward (int16), changes included and replay not."""
        own = [layer for layer in self._own if layer is not None]
        if len(own) != len(self._own):
            raise RoutingError("no whole forward ran under these routes yet: run one inside the context")
        return torch.stack(own).view_as(self.routes_LBTK)

    def choose(self, own_NK: Tensor, layer: int) -> Tensor:
        """The route of every token of this layer, its own choice where the route is not known."""
        _, rows, width, top_k = self.routes_LBTK.shape
        if len(own_NK) != rows * width:
            raise RoutingError(
                f"a forward of {len(own_NK)} tokens meets routes of {rows} × {width} = {rows * width}. "
                "Give the routes of exactly the rows and columns of this forward; one decoded token by token has none."
            )
        self._own[layer] = own_NK.detach().to(torch.int16)
        routes_NK = self.routes_LBTK[layer].reshape(-1, top_k).to(own_NK)
        return torch.where(routes_NK == UNKNOWN, own_NK, routes_NK)


class _Active:
    """What is switched on for the routers of one model; shared by all taps of that model."""

    def __init__(self) -> None:
        self.recorded: list[Recorded] = []
        self.replayed: Replayed | None = None
        # Those that stay, which act first, and those of the contexts entered.
        self.standing: list[RouterChange] = []
        self.entered: list[RouterChange] = []
        # Runs of a router while something was on.
        self.reached = 0

    def __bool__(self) -> bool:
        return bool(self.recorded or self.standing or self.entered) or self.replayed is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Active:
        # A copied module keeps what stays; nobody could end a context for it.
        other = _Active()
        other.standing = list(self.standing)
        return other

    @property
    def changes(self) -> list[RouterChange]:
        return self.standing + self.entered


class _TappedForward:
    """`forward` of one router: its own, bit for bit, while nothing is switched on.

    It lies in the instance, where it is no part of the state dict and where a module that is built anew has none. Its
    attributes are copied with the module by `deepcopy`, so that a copy calls its own weights.
    """

    def __init__(self, router: Router, layer: int, active: _Active) -> None:
        self.own = router.module.forward
        self.name = type(router.module).__name__
        self.layer, self.experts, self.top_k = layer, router.experts, router.top_k
        self.active = active

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.own(*args, **kwargs)
        self.active.reached += 1
        changes, replayed = self.active.changes, self.active.replayed
        watch = Watch(
            self.experts,
            self.top_k,
            logits=self._logits if changes else None,
            choose=self._choose if changes or replayed else None,
        )
        with watch:
            out = self.own(*args, **kwargs)
        self._check(watch, out)
        # A layer that a backward pass runs again (gradient checkpointing) feeds no token.
        if torch._C._current_graph_task_id() == -1:
            for recorded in self.active.recorded:
                recorded.add(out[2], self.layer)
        return out

    def _logits(self, logits_NE: Tensor) -> Tensor:
        for change in self.active.changes:
            changed_NE = change.logits(logits_NE, self.layer)
            if changed_NE.shape != logits_NE.shape or changed_NE.dtype != logits_NE.dtype:
                got, legal = (f"{x.dtype} {tuple(x.shape)}" for x in (changed_NE, logits_NE))
                raise RoutingError(f"{type(change).__name__}.logits gave {got}; legal: {legal}, as the gate has it")
            logits_NE = changed_NE
        return logits_NE

    def _choose(self, scores_NE: Tensor, own_NK: Tensor) -> Tensor:
        chosen_NK = own_NK
        for change in self.active.changes:
            chosen_NK = change.choose(scores_NE, chosen_NK, self.layer)
            if chosen_NK.shape != own_NK.shape or chosen_NK.dtype != own_NK.dtype:
                got, legal = (f"{x.dtype} {tuple(x.shape)}" for x in (chosen_NK, own_NK))
                raise RoutingError(f"{type(change).__name__}.choose gave {got}; legal: {legal}")
        return chosen_NK if self.active.replayed is None else self.active.replayed.choose(chosen_NK, self.layer)

    def _check(self, watch: Watch, out: Any) -> None:
        where = f"router {self.layer} ({self.name})"
        if watch.selections != 1:
            raise RoutingError(f"{where} selected experts {watch.selections} times in one forward; legal: once")
        if self.active.changes and watch.gates != 1:
            raise RoutingError(f"{where} has no gate with {self.experts} outputs: its logits cannot be changed")
        chosen_NK = watch.chosen_NK
        assert chosen_NK is not None
        # The comparison waits for the device; most families hand back the very tensor.
        if out[2] is not chosen_NK and not torch.equal(out[2], chosen_NK):
            raise RoutingError(f"{where} returned other experts than it was told to take")


class RouterTap:
    """Records, replays and changes what the routers of a model choose.

    While none of the three is switched on the model runs as without a tap. They combine; inside a router the order is:
    change of the logits, selection, change of the choice, replay, record of what was used in the end. Several taps of
    one model share what is switched on. See docs/routing.md for the families, and for what bypasses a tap.

    Attributes
    ----------
    layers, experts, top_k : int
        Layers that route, experts of each, and experts a token.

    Raises
    ------
    RoutingError
        If the model is dense, or a router is of a kind that cannot be recorded and replayed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        routers = routers_of(model)
        self.layers, self.experts, self.top_k = len(routers), routers[0].experts, routers[0].top_k
        present = [router.module.__dict__.get("forward") for router in routers]
        taps = [forward for forward in present if isinstance(forward, _TappedForward)]
        if len(taps) == len(routers):
            self._active = taps[0].active
            return
        if any(forward is not None for forward in present):
            raise refusal(model, "something else has replaced the forward of its routers")
        self._active = _Active()
        for layer, router in enumerate(routers):
            router.module.forward = _TappedForward(router, layer, self._active)

    @contextmanager
    def recording(self) -> Iterator[Recorded]:
        """Record the route of every token fed inside; layers that a backward pass runs again are left out."""
        recorded = Recorded(self.layers, self.top_k)
        before = self._active.recorded
        self._active.recorded = [*before, recorded]
        try:
            yield recorded
        finally:
            self._active.recorded = before

    @contextmanager
    def replaying(self, routes_LBTK: Tensor) -> Iterator[Replayed]:
        """Force routes (int16, −1 for the router's own choice) on every forward inside, each of exactly B × T tokens.

        With gradient checkpointing the backward pass must run inside as well: it repeats the forward. A context in
        which no router ran is a `RoutingError`.
        """
        if self._active.replayed is not None:
            raise RoutingError("routes are being replayed already: leave the outer context first")
        replayed = Replayed(routes_LBTK, self.layers, self.experts, self.top_k)
        reached, self._active.replayed = self._active.reached, replayed
        try:
            yield replayed
        finally:
            self._active.replayed = None
        self._require_use(reached, "replayed")

    @contextmanager
    def changing(self, change: RouterChange) -> Iterator[None]:
        """Let `change` act on every router inside; of several, each sees what the ones before made.

        A context in which no router ran is a `RoutingError`.
        """
        reached, before = self._active.reached, self._active.entered
        self._active.entered = [*before, change]
        try:
            yield
        finally:
            self._active.entered = before
        self._require_use(reached, "changed")

    def always(self, change: RouterChange) -> None:
        """Let `change` act on every forward from now on, before those of contexts; not in a `clean_copy`."""
        self._active.standing.append(change)

    def _require_use(self, reached: int, what: str) -> None:
        # A treatment that never acted must not pass for one: fused kernels run past a router's forward.
        if self._active.reached == reached:
            raise RoutingError(
                f"no router ran while routes were to be {what}: no forward ran in the context, or it bypassed "
                "the routers (use_kernels and fused engines do)"
            )
