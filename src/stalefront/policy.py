"""Log-probs of a model on a padded batch: the trainer's forward, with explicit position ids."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokenLogps(NamedTuple):
    """Log-prob of every completion token and entropy of its distribution (nats, float32, B × T, 0 off the mask)."""

    logp_BT: Tensor
    entropy_BT: Tensor


def token_logps(
    model: torch.nn.Module, tokens_BT: Tensor, position_BT: Tensor, mask_BT: Tensor, *, temperature: float
) -> TokenLogps:
    """log p(token | prefix) at `temperature` for the tokens of `mask_BT`.

    Parameters
    ----------
    tokens_BT, position_BT : int64 (B, T)
        Position −1 is padding; padding is attended to by nobody.
    mask_BT : bool (B, T)
        Tokens asked for; the first column can never be one.

    Notes
    -----
    Logits are computed from the first position that predicts an asked-for token on, in float32. Position ids are
    given explicitly: taken from the mask on one side and counted on the other, they alone make two forwards of equal
    weights differ.
    """
    first = int(mask_BT.any(0).float().argmax())
    keep = tokens_BT.shape[1] - first
    logits = forward(model, tokens_BT, position_BT, logits_to_keep=keep + 1).logits[:, :-1].float()
    logp_all = torch.log_softmax(logits / temperature, dim=-1)
    chosen = logp_all.gather(-1, tokens_BT[:, first:, None]).squeeze(-1)
    with torch.no_grad():
        entropy = torch.special.entr(logp_all.detach().exp()).sum(-1)
    mask = mask_BT[:, first:]
    zero = chosen.new_zeros(())
    pad = (first, 0)
    return TokenLogps(
        torch.nn.functional.pad(torch.where(mask, chosen, zero), pad),
        torch.nn.functional.pad(torch.where(mask, entropy, zero), pad),
    )


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
