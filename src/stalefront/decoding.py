"""Batched decoding with a key-value cache: where the logits of the next token come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from stalefront.policy import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stalefront.routing import RouterChange, RouterTap


class Prompts(NamedTuple):
    """Left-padded prompts: token ids and positions (int64, P × L; position −1 is padding)."""

    tokens_PL: Tensor
    position_PL: Tensor

    def rows(self, rows: slice) -> Prompts:
        """Some of them."""
        return Prompts(self.tokens_PL[rows], self.position_PL[rows])


class Decoding(Protocol):
    """State of one batched decode."""

    @property
    def logits(self) -> Tensor:
        """Logits of the next token, float32 (B, V), before any temperature."""

    def advance(self, token_B: Tensor) -> None:
        """Feed the drawn tokens."""

    def routes_LBTK(self) -> Tensor | None:
        """Experts chosen for every token fed so far, int16, −1 where none is known; None without routers."""


class Routers(NamedTuple):
    """What to do about the routers of a sampler's module.

    Attributes
    ----------
    tap
        Handle on them.
    change
        Made for every forward, from the place of its tokens: group (int64, N) or row (N), and position (N).
    """

    tap: RouterTap
    change: Callable[[Tensor, Tensor], Sequence[RouterChange]]


class Cached:
    """The usual way: the prompt is run once, its cache copied to the samples of its group, then a token at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Prompts,
        num_generations: int,
        *,
        routers: Routers | None = None,
        before: PreTrainedModel | None = None,
        stale: float = 0.0,
        first_row: int = 0,
    ) -> None:
        """`before` makes the cache of all but the prompts' last tokens, a share `stale` of the way to its own."""
        self.model, self.routers = model, routers
        self.cache_name = cache_argument(model)
        self.cache = DynamicCache(config=model.config)
        self._routes: list[Tensor] = []
        self.row_B = first_row + torch.arange(len(prompts.tokens_PL) * num_generations, device=prompts.tokens_PL.device)
        padded = prompts.position_PL < 0
        self.attention = (~padded).long() if bool(padded.any()) else None
        self.row_N = self.row_B[::num_generations]
        logits = self._prefill(prompts, before, stale)
        self.cache.batch_repeat_interleave(num_generations)
        self.logits = logits.repeat_interleave(num_generations, 0)
        self._routes = [route.repeat_interleave(num_generations, 1) for route in self._routes]
        self.row_N = self.row_B
        self.next_position = prompts.position_PL[:, -1].repeat_interleave(num_generations, 0) + 1
        if self.attention is not None:
            self.attention = self.attention.repeat_interleave(num_generations, 0)

    def _prefill(self, prompts: Prompts, before: PreTrainedModel | None, stale: float) -> Tensor:
        tokens, position = prompts
        if before is None or tokens.shape[1] == 1:
            return self._step(tokens, position)
        old = _filled(before, tokens[:, :-1], position[:, :-1])
        if stale != 1:
            new = _filled(self.model, tokens[:, :-1], position[:, :-1])
            for mine, other in zip(new.layers, old.layers, strict=True):
                mine.keys = mine.keys + stale * (other.keys - mine.keys)
                mine.values = mine.values + stale * (other.values - mine.values)
            old = new
        self.cache = old
        if self.routers is not None:  # nobody recorded the routes that a cache from before was made by
            shape = (self.routers.tap.layers, len(tokens), tokens.shape[1] - 1, self.routers.tap.top_k)
            self._routes.append(torch.full(shape, -1, dtype=torch.int16, device=tokens.device))
        return self._step(tokens[:, -1:], position[:, -1:])

    def advance(self, token_B: Tensor) -> None:
        """Feed the drawn tokens."""
        if self.attention is not None:
            self.attention = torch.cat([self.attention, self.attention.new_ones(len(token_B), 1)], 1)
        self.logits = self._step(token_B[:, None], self.next_position[:, None])
        self.next_position = self.next_position + 1

    def _step(self, tokens: Tensor, position: Tensor) -> Tensor:
        cache: dict[str, Any] = {self.cache_name: self.cache}
        run = {"use_cache": True, "logits_to_keep": 1, "attention_mask": self.attention, **cache}
        if self.routers is None:
            out = self.model(input_ids=tokens, position_ids=position.clamp(min=0), **run)
        else:
            out = self._routed(tokens, position, run)
        logits: Tensor = out.logits[:, -1].float()
        return logits

    def _routed(self, tokens: Tensor, position: Tensor, run: dict[str, Any]) -> Any:
        """A forward whose routers are changed and recorded."""
        assert self.routers is not None
        rows = self.row_N[:, None].expand_as(tokens).reshape(-1)
        with ExitStack() as stack:
            for change in self.routers.change(rows, position.clamp(min=0).reshape(-1)):
                stack.enter_context(self.routers.tap.changing(change))
            recorded = stack.enter_context(self.routers.tap.recording())
            out = self.model(input_ids=tokens, position_ids=position.clamp(min=0), **run)
            routes_LNK = recorded.routes_LNK()
        routes = routes_LNK.view(routes_LNK.shape[0], *tokens.shape, routes_LNK.shape[-1])
        self._routes.append(routes.masked_fill((position < 0)[None, :, :, None], -1))
        return out

    def routes_LBTK(self) -> Tensor | None:
        """Experts of every token fed so far."""
        return torch.cat(self._routes, 2) if self._routes else None


def _filled(model: PreTrainedModel, tokens: Tensor, position: Tensor) -> DynamicCache:
    """Cache of a forward over left-padded tokens."""
    cache = DynamicCache(config=model.config)
    padded = position < 0
    named: dict[str, Any] = {cache_argument(model): cache}
    attention = (~padded).long() if bool(padded.any()) else None
    # Of the logits, which nobody looks at, as few as possible.
    run = {"attention_mask": attention, "use_cache": True, "logits_to_keep": 1, **named}
    model(input_ids=tokens, position_ids=position.clamp(min=0), **run)
    return cache


class Chunked:
    """Rows decoded a few prompts at a time, so that every matrix product has another shape than in one batch."""

    def __init__(self, parts: Sequence[Decoding], sizes: Sequence[int]) -> None:
        self.parts, self.sizes = parts, list(sizes)

    @property
    def logits(self) -> Tensor:
        """Those of all parts."""
        return torch.cat([part.logits for part in self.parts])

    def advance(self, token_B: Tensor) -> None:
        """Feed every part its tokens."""
        for part, token in zip(self.parts, torch.split(token_B, self.sizes), strict=True):
            part.advance(token)

    def routes_LBTK(self) -> Tensor | None:
        """Those of all parts."""
        found = [part.routes_LBTK() for part in self.parts]
        return torch.cat([routes for routes in found if routes is not None], 1) if found[0] is not None else None


class Blended:
    """ℓ + strength · (ℓ′ − ℓ) of two decodes side by side; routes are those of the second."""

    def __init__(self, plain: Decoding, other: Decoding, strength: float) -> None:
        self.plain, self.other, self.strength = plain, other, strength

    @property
    def logits(self) -> Tensor:
        """The mixture."""
        return self.plain.logits + self.strength * (self.other.logits - self.plain.logits)

    def advance(self, token_B: Tensor) -> None:
        """Feed both."""
        self.plain.advance(token_B)
        self.other.advance(token_B)

    def routes_LBTK(self) -> Tensor | None:
        """Those of the other way."""
        return self.other.routes_LBTK()


class Teacher:
    """The trainer's own forward for every token: no cache, and the very shapes that the learner will use.

    A forward's last bits depend on its shape, so rows are run in the learner's slices and at the full width: the prompt
    and the longest completion. Masked positions add exact zeros, so that what is still padding changes no bit.
    """

    def __init__(
        self,
        logits: Callable[[Tensor, Tensor], Tensor],
        prompts: Prompts,
        num_generations: int,
        *,
        slices: Sequence[Tensor],
        length: int,
        pad: int,
    ) -> None:
        """`logits(tokens_BT, position_BT)` gives those of the completion's places, (B, C, V), for one of the slices."""
        prompt_BL = prompts.tokens_PL.repeat_interleave(num_generations, 0)
        place_BL = prompts.position_PL.repeat_interleave(num_generations, 0)
        answer_BC = prompt_BL.new_full((len(prompt_BL), length), pad)
        place_BC = place_BL[:, -1:] + 1 + torch.arange(length, device=place_BL.device)
        self._logits, self.slices, self.column = logits, slices, 0
        self.first = prompt_BL.shape[1]
        self.tokens_BT = torch.cat([prompt_BL, answer_BC], 1)
        self.position_BT = torch.cat([place_BL, place_BC], 1)

    @property
    def logits(self) -> Tensor:
        """One forward of every slice."""
        found: Tensor | None = None
        for rows in self.slices:
            piece = self._logits(self.tokens_BT[rows], self.position_BT[rows])[:, self.column]
            found = piece.new_empty(len(self.tokens_BT), piece.shape[-1]) if found is None else found
            found[rows] = piece
        assert found is not None
        return found

    def advance(self, token_B: Tensor) -> None:
        """Put the tokens in their place."""
        self.tokens_BT[:, self.first + self.column] = token_B
        self.column += 1

    def routes_LBTK(self) -> Tensor | None:
        """None: the trainer's forward makes the same choices again."""
        return None
