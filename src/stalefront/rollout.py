"""Sampling with a key-value cache: a shared prefill a prompt, behaviour log-probs, one uniform number a token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from stalefront.batch import real_BT
from stalefront.decoding import Prompts
from stalefront.inference import Engines, Inference, Place
from stalefront.keys import uniforms_BT
from stalefront.routing import token_hash_B
from stalefront.support import pack_support

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Samples:
    """Sampled sequences: prompt and completion side by side.

    Attributes
    ----------
    tokens_BT, position_BT : int64
    mask_BT : bool
        Completion tokens, the one that ended it included.
    logp_behav_BT : float32, nats
        Log-prob of each sampled token under the distribution it was drawn from.
    truncated_B : bool
        Cut at the length limit.
    completion_ids, texts : lists of B
        Token ids of each completion without the end token, and its text.
    routes_LBTK : int16, or None
        Experts chosen for every token that was fed, −1 elsewhere.
    route_hash_B : int64, or None
        Hash of the tokens that the routes were recorded on.
    support_BTK : int32, or None
        Ids a truncated sampler kept, where the trainer is told, −1 beyond them.
    misaligned_B : int64, or None
        Sampled tokens whose log-prob was lost when the text was encoded again.
    """

    tokens_BT: Tensor
    position_BT: Tensor
    mask_BT: Tensor
    logp_behav_BT: Tensor
    truncated_B: Tensor
    completion_ids: list[list[int]]
    texts: list[str]
    routes_LBTK: Tensor | None = None
    route_hash_B: Tensor | None = None
    support_BTK: Tensor | None = None
    misaligned_B: Tensor | None = None

    def widened(self, width: int, pad: int, support: int = 0) -> Samples:
        """The same sequences with padding after them, `width` columns in all: as if longer ones were among them.

        Lists of kept ids are filled up to `support`, as if a longer one were among them.
        """
        more = width - self.tokens_BT.shape[1]
        counted = torch.arange(1, more + 1, device=self.position_BT.device)
        routes, kept = self.routes_LBTK, self.support_BTK
        return replace(
            self,
            tokens_BT=padded(self.tokens_BT, (0, more), value=pad),
            position_BT=torch.cat([self.position_BT, self.position_BT[:, -1:] + counted], 1),
            mask_BT=padded(self.mask_BT, (0, more)),
            logp_behav_BT=padded(self.logp_behav_BT, (0, more)),
            routes_LBTK=None if routes is None else padded(routes, (0, 0, 0, more), value=-1),
            support_BTK=None if kept is None else padded(kept, (0, max(support - kept.shape[2], 0), 0, more), value=-1),
        )


class Sampler:
    """Samples completions of any causal language model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_completion_length: int,
        temperature: float,
        stop: str | None,
        end_ids: list[int],
    ) -> None:
        """`end_ids` are the model's end tokens; with `stop`, every token whose text contains it ends a row too."""
        self.tokenizer = tokenizer
        self.max_completion_length = max_completion_length
        self.temperature = temperature
        self.stop = stop
        self.end_ids = sorted(set(end_ids))
        self.stop_ids = [] if stop is None else [i for i in range(len(tokenizer)) if stop in tokenizer.decode([i])]

    def pad(self, rows: list[list[int]], device: torch.device) -> Prompts:
        """Left-pad tokenised prompts to one width."""
        width = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        tokens = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
        position = torch.tensor([[-1] * (width - len(row)) + list(range(len(row))) for row in rows])
        return Prompts(tokens.to(device), position.to(device))

    @torch.no_grad()
    def sample(
        self,
        model: PreTrainedModel | Engines,
        prompts: Prompts,
        *,
        num_generations: int,
        seed: int,
        purpose: str,
        batch: int,
        first_row: int = 0,
        inference: Inference | None = None,
        watch: Callable[[Tensor], None] | None = None,
    ) -> Samples:
        """Draw `num_generations` completions of each prompt, next to one another.

        Row b of the result uses the uniform numbers keyed by (`seed`, `purpose`, `batch`, `first_row` + b), so that
        it doesn't depend on what else is in the batch, nor on how a batch is cut into pieces. `inference` says how; by
        default as the trainer would. `watch` is shown the log-probs (B, V) that every column is drawn from.
        """
        inference = inference or Inference(self.temperature)
        engines = model if isinstance(model, Engines) else inference.load(model)
        rows, length = prompts.tokens_PL.shape[0] * num_generations, self.max_completion_length
        uniform = uniforms_BT(seed, purpose, batch, rows, length, first_row)
        uniform_BT = torch.from_numpy(uniform).to(prompts.tokens_PL.device)
        rollout = inference.start(engines, prompts, num_generations, length, Place(seed, purpose, batch, first_row))
        ends = torch.tensor(self.end_ids + self.stop_ids, device=uniform_BT.device)
        done_B = torch.zeros(rows, dtype=torch.bool, device=uniform_BT.device)
        columns: list[Column] = []
        while True:
            drawn = rollout.draw()
            if watch is not None:
                watch(drawn.logp_BV)
            token_B = inverse(drawn.logp_BV, uniform_BT[:, len(columns)])
            columns.append(
                Column(
                    token_B.where(~done_B, self.tokenizer.pad_token_id),
                    rollout.log(drawn, token_B).where(~done_B, 0.0),
                    ~done_B,
                    None if drawn.keep_BV is None else pack_support(drawn.keep_BV).where(~done_B[:, None], -1),
                )
            )
            done_B = done_B | torch.isin(token_B, ends)
            if bool(done_B.all()) or len(columns) == length:
                break
            rollout.advance(columns[-1].token_B)
        return self._collect(prompts, num_generations, columns, ~done_B, rollout.decoding.routes_LBTK())

    def _collect(
        self,
        prompts: Prompts,
        num_generations: int,
        columns: list[Column],
        truncated_B: Tensor,
        routes_LBTK: Tensor | None,
    ) -> Samples:
        prompt_BL = prompts.tokens_PL.repeat_interleave(num_generations, 0)
        place_BL = prompts.position_PL.repeat_interleave(num_generations, 0)
        answer_BC, mask_BC = (torch.stack([getattr(c, name) for c in columns], 1) for name in ("token_B", "mask_B"))
        start_B1 = place_BL[:, -1:] + 1
        # Padding after the end keeps counting: causal attention never lets a real token see it.
        place_BC = start_B1 + torch.arange(answer_BC.shape[1], device=answer_BC.device)
        ids = [
            [t for t in row[keep].tolist() if t not in self.end_ids]
            for row, keep in zip(answer_BC.cpu(), mask_BC.cpu(), strict=True)
        ]
        mask_BT = torch.cat([torch.zeros_like(prompt_BL, dtype=torch.bool), mask_BC], 1)
        logp_BC = torch.stack([column.logp_B for column in columns], 1)
        tokens_BT, position_BT = torch.cat([prompt_BL, answer_BC], 1), torch.cat([place_BL, place_BC], 1)
        routed = routes_LBTK is not None
        return Samples(
            tokens_BT=tokens_BT,
            position_BT=position_BT,
            mask_BT=mask_BT,
            logp_behav_BT=torch.cat([torch.zeros_like(prompt_BL, dtype=torch.float32), logp_BC], 1),
            truncated_B=truncated_B,
            completion_ids=ids,
            texts=[self._text(row) for row in ids],
            routes_LBTK=None if routes_LBTK is None else _placed_routes(routes_LBTK, mask_BT, prompt_BL.shape[1]),
            route_hash_B=token_hash_B(tokens_BT, real_BT(position_BT, mask_BT)) if routed else None,
            support_BTK=_placed_support([column.kept_BK for column in columns], prompt_BL.shape[1]),
        )

    def _text(self, ids: list[int]) -> str:
        # Special tokens stay: an answer with a stray padding token in it is not the answer.
        text = str(self.tokenizer.decode(ids, skip_special_tokens=False))
        return text if self.stop is None else text.split(self.stop)[0]


class Column(NamedTuple):
    """One column of completions: tokens, what was written down of them, which rows were still going, ids kept."""

    token_B: Tensor
    logp_B: Tensor
    mask_B: Tensor
    kept_BK: Tensor | None


def inverse(logp_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Token by inverse distribution function, in float64."""
    cumulative = logp_BV.double().exp().cumsum(-1)
    # A NaN row (weights gone) finds no place and takes the last token; its log-prob is NaN and stays so.
    token_B = torch.searchsorted(cumulative, (uniform_B * cumulative[:, -1])[:, None], right=True).squeeze(-1)
    return token_B.clamp(max=logp_BV.shape[-1] - 1)


def _placed_routes(routes_LBTK: Tensor, mask_BT: Tensor, prompt: int) -> Tensor:
    """Routes at the width of the batch; −1 for tokens that no token of their row was drawn after.

    The token that ends a row is fed where other rows go on. Which those are must not show: ranks cut batches.
    """
    missing = mask_BT.shape[1] - routes_LBTK.shape[2]
    whole = padded(routes_LBTK, (0, 0, 0, missing), value=-1)
    off_BT = ~padded(mask_BT[:, 1:], (0, 1))
    off_BT[:, :prompt] = False
    return whole.masked_fill(off_BT[None, :, :, None], -1)


def _placed_support(kept: list[Tensor | None], prompt: int) -> Tensor | None:
    """Kept ids of every column, as many places for all as the longest list needs; none for the prompt."""
    lists = [column for column in kept if column is not None]
    if not lists:
        return None
    width = max(column.shape[1] for column in lists)
    filled = torch.stack([padded(column, (0, width - column.shape[1]), value=-1) for column in lists], 1)
    return padded(filled, (0, 0, prompt, 0), value=-1)
