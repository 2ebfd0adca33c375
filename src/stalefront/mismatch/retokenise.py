"""Completions that travel as text and are encoded again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from stalefront.batch import real_BT
from stalefront.mismatch import Mismatch
from stalefront.noise import uniforms
from stalefront.routing import token_hash_B

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stalefront.rollout import Samples


class Row(NamedTuple):
    """Completion of a row as it arrives: token ids, log-probs, which of them have one, and how many lost theirs."""

    tokens: list[int]
    logps: list[float]
    aligned: list[bool]
    lost: int


@dataclass(frozen=True)
class Retokenise(Mismatch):
    """A share `strength` of the sequences is decoded and encoded again, as a gateway that carries text does.

    The trainer sees the new tokens. One that equals a sampled token, over the same characters, keeps its log-prob; the
    others have none, are masked, and are counted (`misaligned_frac`). Rewards are those of the sampled text. Routes of
    a completion that changed are forgotten: they belong to tokens that are gone.
    """

    place = "text"
    largest = 1.0

    def __call__(
        self, samples: Samples, key_B: Tensor, tokenizer: PreTrainedTokenizerBase, end_ids: list[int]
    ) -> Samples:
        """`samples` with the chosen rows' tokens replaced; widths follow the longest row."""
        chosen_B = uniforms(key_B, 0, 1).squeeze(-1) < self.strength
        prompt = int(samples.mask_BT.any(0).float().argmax())
        rows = [
            self._row(samples, b, prompt, tokenizer if again else None, end_ids)
            for b, again in enumerate(chosen_B.tolist())
        ]
        return _rebuilt(samples, rows, prompt, tokenizer.pad_token_id)

    def _row(
        self,
        samples: Samples,
        row: int,
        prompt: int,
        tokenizer: PreTrainedTokenizerBase | None,
        end_ids: list[int],
    ) -> Row:
        from stalefront.realign import realign

        kept = samples.mask_BT[row, prompt:]
        tokens = samples.tokens_BT[row, prompt:][kept].tolist()
        logps = samples.logp_behav_BT[row, prompt:][kept].tolist()
        if tokenizer is None:
            return Row(tokens, logps, [True] * len(tokens), 0)
        # The token that ends a row is no text, and comes after it as before.
        body = len(tokens) - (bool(tokens) and tokens[-1] in end_ids)
        found = realign(tokens[:body], tokenizer)
        from_sampled = [*found.kept, *range(body, len(tokens))]
        return Row(
            [*found.ids, *tokens[body:]],
            [logps[place] if place >= 0 else 0.0 for place in from_sampled],
            [place >= 0 for place in from_sampled],
            body - sum(place >= 0 for place in found.kept),
        )


def _rebuilt(samples: Samples, rows: list[Row], prompt: int, pad: int) -> Samples:
    width = max([samples.tokens_BT.shape[1] - prompt, *(len(row.tokens) for row in rows)])
    device, dtype = samples.tokens_BT.device, samples.logp_behav_BT.dtype

    def column(values: list[list[float]], off: float, kind: torch.dtype) -> Tensor:
        filled = [[*value, *[off] * (width - len(value))] for value in values]
        return torch.tensor(filled, dtype=kind, device=device)

    wide = samples.widened(prompt + width, pad)
    tokens_BC = column([list(map(float, row.tokens)) for row in rows], float(pad), torch.float64).long()
    aligned_BC = column([list(map(float, row.aligned)) for row in rows], 0.0, torch.float32).bool()
    tokens_BT = torch.cat([wide.tokens_BT[:, :prompt], tokens_BC], 1)
    mask_BT = padded(aligned_BC, (prompt, 0))
    changed_B = ((tokens_BT != wide.tokens_BT) | (mask_BT != wide.mask_BT)).any(-1)
    routes, support, hashed = wide.routes_LBTK, wide.support_BTK, wide.route_hash_B
    if routes is not None and hashed is not None:
        routes = routes.clone()
        routes[:, changed_B, prompt:] = -1
        # What is left of these rows' routes belongs to the prompt, and goes on with the new tokens.
        hashed = torch.where(changed_B, token_hash_B(tokens_BT, real_BT(wide.position_BT, mask_BT)), hashed)
    return replace(
        wide,
        tokens_BT=tokens_BT,
        mask_BT=mask_BT,
        logp_behav_BT=padded(column([row.logps for row in rows], 0.0, dtype), (prompt, 0)),
        routes_LBTK=routes,
        route_hash_B=hashed,
        support_BTK=None if support is None else support.masked_fill(changed_B[:, None, None], -1),
        misaligned_B=torch.tensor([row.lost for row in rows], device=device),
    )
