"""Sampling with a key-value cache: a shared prefill a prompt, behaviour log-probs, one uniform number a token."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from stalefront.keys import uniforms_BT
from stalefront.policy import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Prompts(NamedTuple):
    """Left-padded prompts: token ids and positions (int64, P × L; position −1 is padding)."""

    tokens_PL: Tensor
    position_PL: Tensor


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
    """

    tokens_BT: Tensor
    position_BT: Tensor
    mask_BT: Tensor
    logp_behav_BT: Tensor
    truncated_B: Tensor
    completion_ids: list[list[int]]
    texts: list[str]

    def widened(self, width: int, pad: int) -> Samples:
        """The same sequences with padding after them, `width` columns in all: as if longer ones were among them."""
        more = width - self.tokens_BT.shape[1]
        right = functools.partial(torch.nn.functional.pad, pad=(0, more))
        counted = torch.arange(1, more + 1, device=self.position_BT.device)
        return replace(
            self,
            tokens_BT=right(self.tokens_BT, value=pad),
            position_BT=torch.cat([self.position_BT, self.position_BT[:, -1:] + counted], 1),
            mask_BT=right(self.mask_BT),
            logp_behav_BT=right(self.logp_behav_BT),
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
        model: PreTrainedModel,
        prompts: Prompts,
        *,
        num_generations: int,
        seed: int,
        purpose: str,
        batch: int,
        first_row: int = 0,
    ) -> Samples:
        """Draw `num_generations` completions of each prompt, next to one another.

        Row b of the result uses the uniform numbers keyed by (`seed`, `purpose`, `batch`, `first_row` + b), so that
        it doesn't depend on what else is in the batch, nor on how a batch is cut into pieces.
        """
        rows = prompts.tokens_PL.shape[0] * num_generations
        uniform = uniforms_BT(seed, purpose, batch, rows, self.max_completion_length, first_row)
        uniform_BT = torch.from_numpy(uniform).to(prompts.tokens_PL.device)
        steps = _Decoding(model, prompts, num_generations, self.temperature)
        ends = torch.tensor(self.end_ids + self.stop_ids, device=uniform_BT.device)
        done_B = torch.zeros(rows, dtype=torch.bool, device=uniform_BT.device)
        tokens, logps, masks = [], [], []
        for column in range(self.max_completion_length):
            token_B, logp_B = steps.draw(uniform_BT[:, column])
            masks.append(~done_B)
            tokens.append(token_B.where(~done_B, self.tokenizer.pad_token_id))
            logps.append(logp_B.where(~done_B, 0.0))
            done_B = done_B | torch.isin(token_B, ends)
            if bool(done_B.all()):
                break
            if column + 1 < self.max_completion_length:
                steps.advance(tokens[-1])
        return self._collect(prompts, num_generations, tokens, logps, masks, ~done_B)

    def _collect(
        self,
        prompts: Prompts,
        num_generations: int,
        tokens: list[Tensor],
        logps: list[Tensor],
        masks: list[Tensor],
        truncated_B: Tensor,
    ) -> Samples:
        prompt_BL = prompts.tokens_PL.repeat_interleave(num_generations, 0)
        place_BL = prompts.position_PL.repeat_interleave(num_generations, 0)
        answer_BC, mask_BC = torch.stack(tokens, 1), torch.stack(masks, 1)
        start_B1 = place_BL[:, -1:] + 1
        # Padding after the end keeps counting: causal attention never lets a real token see it.
        place_BC = start_B1 + torch.arange(answer_BC.shape[1], device=answer_BC.device)
        ids = [
            [t for t in row[keep].tolist() if t not in self.end_ids]
            for row, keep in zip(answer_BC.cpu(), mask_BC.cpu(), strict=True)
        ]
        return Samples(
            tokens_BT=torch.cat([prompt_BL, answer_BC], 1),
            position_BT=torch.cat([place_BL, place_BC], 1),
            mask_BT=torch.cat([torch.zeros_like(prompt_BL, dtype=torch.bool), mask_BC], 1),
            logp_behav_BT=torch.cat([torch.zeros_like(prompt_BL, dtype=torch.float32), torch.stack(logps, 1)], 1),
            truncated_B=truncated_B,
            completion_ids=ids,
            texts=[self._text(row) for row in ids],
        )

    def _text(self, ids: list[int]) -> str:
        # Special tokens stay: an answer with a stray padding token in it is not the answer.
        text = str(self.tokenizer.decode(ids, skip_special_tokens=False))
        return text if self.stop is None else text.split(self.stop)[0]


class _Decoding:
    """State of one batched decode: the cache and the logits of the next token."""

    def __init__(self, model: PreTrainedModel, prompts: Prompts, num_generations: int, temperature: float) -> None:
        self.model, self.temperature = model, temperature
        self.cache_name = cache_argument(model)
        self.cache = DynamicCache(config=model.config)
        padded = prompts.position_PL < 0
        self.attention = (~padded).long() if bool(padded.any()) else None
        logits = self._step(prompts.tokens_PL, prompts.position_PL.clamp(min=0))
        # The prompt is run once and its cache copied to the samples of its group.
        self.cache.batch_repeat_interleave(num_generations)
        self.logits = logits.repeat_interleave(num_generations, 0)
        self.next_position = prompts.position_PL[:, -1].repeat_interleave(num_generations, 0) + 1
        if self.attention is not None:
            self.attention = self.attention.repeat_interleave(num_generations, 0)

    def draw(self, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
        """Token by inverse distribution function (in float64) and its log-prob."""
        logp_BV = torch.log_softmax(self.logits / self.temperature, dim=-1)
        cumulative = logp_BV.double().exp().cumsum(-1)
        # A NaN row (weights gone) finds no place and takes the last token; its log-prob is NaN and stays so.
        token_B = torch.searchsorted(cumulative, (uniform_B * cumulative[:, -1])[:, None], right=True).squeeze(-1)
        token_B = token_B.clamp(max=logp_BV.shape[-1] - 1)
        return token_B, logp_BV.gather(-1, token_B[:, None]).squeeze(-1)

    def advance(self, token_B: Tensor) -> None:
        """Feed the drawn tokens."""
        if self.attention is not None:
            self.attention = torch.cat([self.attention, self.attention.new_ones(len(token_B), 1)], 1)
        self.logits = self._step(token_B[:, None], self.next_position[:, None])
        self.next_position = self.next_position + 1

    def _step(self, tokens: Tensor, position: Tensor) -> Tensor:
        cache: dict[str, Any] = {self.cache_name: self.cache}
        out = self.model(
            input_ids=tokens,
            attention_mask=self.attention,
            position_ids=position,
            use_cache=True,
            logits_to_keep=1,
            **cache,
        )
        logits: Tensor = out.logits[:, -1].float()
        return logits
