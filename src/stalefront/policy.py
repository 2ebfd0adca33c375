"""Log-probs of a model on a padded batch: the trainer's forward, with explicit position ids."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokenLogps(NamedTuple):
    """Log-prob of every completion token and what its distribution looks like (float32, B × T, 0 off the mask).

    Attributes
    ----------
    logp_BT, entropy_BT : nats
    tail_BT
        Mass of the tokens below the probability that was asked about; None where none was.
    """

    logp_BT: Tensor
    entropy_BT: Tensor
    tail_BT: Tensor | None


def token_logps(
    model: torch.nn.Module,
    tokens_BT: Tensor,
    position_BT: Tensor,
    mask_BT: Tensor,
    *,
    temperature: float,
    support_BTK: Tensor | None = None,
    tail_below: float | None = None,
) -> TokenLogps:
    """log p(token | prefix) at `temperature` for the tokens of `mask_BT`.

    Parameters
    ----------
    tokens_BT, position_BT : int64 (B, T)
        Position −1 is padding; padding is attended to by nobody.
    mask_BT : bool (B, T)
        Tokens asked for; the first column can never be one.
    support_BTK : int32 (B, T, K), or None
        Ids that a token may have, −1 beyond them; a place with none at all is not restricted. Log-probs are those of
        the policy restricted to them.
    tail_below : float or None
        Also return the mass of the tokens whose probability is below this.

    Notes
    -----
    Logits are computed from the first position that predicts an asked-for token on, in float32. Position ids are
    given explicitly: taken from the mask on one side and counted on the other, they alone make two forwards of equal
    weights differ.
    """
    # Nothing predicts the first column; where no token is asked for at all, argmax would name it.
    first = max(int(mask_BT.any(0).float().argmax()), 1)
    logits = completion_logits(model, tokens_BT, position_BT, first=first)
    if support_BTK is not None:
        logits = logits.masked_fill(~_supported(support_BTK[:, first:], logits.shape[-1]), -torch.inf)
    logp_all = torch.log_softmax(logits / temperature, dim=-1)
    chosen = logp_all.gather(-1, tokens_BT[:, first:, None]).squeeze(-1)
    mask = mask_BT[:, first:]
    zero, pad = chosen.new_zeros(()), (first, 0)

    def placed(value: Tensor) -> Tensor:
        return torch.nn.functional.pad(torch.where(mask, value, zero), pad)

    with torch.no_grad():
        probability = logp_all.detach().exp()
        entropy = torch.special.entr(probability).sum(-1)
        tail = None if tail_below is None else torch.where(probability < tail_below, probability, 0.0).sum(-1)
    return TokenLogps(placed(chosen), placed(entropy), None if tail is None else placed(tail))


def completion_logits(model: torch.nn.Module, tokens_BT: Tensor, position_BT: Tensor, *, first: int) -> Tensor:
    """Logits that predict the tokens from column `first` on, float32 (B, T − first, V)."""
    keep = tokens_BT.shape[1] - first
    logits: Tensor = forward(model, tokens_BT, position_BT, logits_to_keep=keep + 1).logits[:, :-1].float()
    return logits


def _supported(support_BCK: Tensor, words: int) -> Tensor:
    """Where a word is in the support (B, C, V); everywhere where the support is empty."""
    kept = torch.zeros(*support_BCK.shape[:2], words + 1, dtype=torch.bool, device=support_BCK.device)
    # Padding ids mark a column beyond the vocabulary, which is cut off.
    kept = kept.scatter(-1, support_BCK.long().remainder(words + 1), True)[..., :words]
    return kept | ~kept.any(-1, keepdim=True)


def forward(model: torch.nn.Module, tokens_BT: Tensor, position_BT: Tensor, **options: Any) -> Any:
    """Teacher-forced forward; the attention mask is left out where nothing is padded, which is the faster path."""
    padded = position_BT < 0
    attention = None if not bool(padded.any()) else (~padded).long()
    return model(
        input_ids=tokens_BT,
        attention_mask=attention,
        position_ids=position_BT.clamp(min=0),
        use_cache=False,
        **options,
    )


def cache_argument(model: torch.nn.Module) -> str:
    """Name of the key-value cache argument: `cache`, or `past_key_values` where a model has not been renamed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
