"""What a sampler cuts off a distribution, and the log-probs that follow: pure functions.

Notation: z = logits, p = softmax(z), S = the support, the tokens that are kept; B rows, T positions, V tokens of the
vocabulary, K slots for the ids of a support. A row that holds NaN keeps all of its tokens and stays NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class RestrictedLogps(NamedTuple):
    """Log-prob of every token and entropy of its distribution (nats, B × T); no gradient to the entropy."""

    logp_BT: Tensor
    entropy_BT: Tensor


def top_p_keep_BV(logits_BV: Tensor, p: float) -> Tensor:
    """S of nucleus sampling (arXiv 1904.09751, eq. 2): the fewest most probable tokens whose mass reaches `p`.

    The token that crosses p is kept, as in transformers and vLLM: v is kept while the mass of the tokens before it is
    below p. Of equally probable tokens the lower id comes first. p = 1 keeps all. Masses are summed in float64.

    Returns
    -------
    bool (B, V)
    """
    if p >= 1:
        return torch.ones_like(logits_BV, dtype=torch.bool)
    prob_BV, order_BV = torch.softmax(logits_BV.double(), dim=-1).sort(dim=-1, descending=True, stable=True)
    before_BV = torch.nn.functional.pad(prob_BV.cumsum(-1)[:, :-1], (1, 0))
    # Asked this way round, NaN is kept.
    return torch.zeros_like(order_BV, dtype=torch.bool).scatter(-1, order_BV, ~(before_BV >= p))


def top_k_keep_BV(logits_BV: Tensor, k: int) -> Tensor:
    """S of top-k sampling (arXiv 1805.04833): exactly the `k` most probable tokens; k ≥ V keeps all.

    Of equally probable tokens the lower id comes first; the warper of transformers keeps all that equal the k-th.

    Returns
    -------
    bool (B, V)
    """
    keep_BV = torch.ones_like(logits_BV, dtype=torch.bool)
    if k >= logits_BV.shape[-1]:
        return keep_BV
    order_BV = logits_BV.argsort(dim=-1, descending=True, stable=True)
    keep_BV = keep_BV.scatter(-1, order_BV[:, k:], False)
    return keep_BV | logits_BV.isnan().any(-1, keepdim=True)


def attenuated(logits_BV: Tensor, keep_BV: Tensor, strength: float) -> Tensor:
    """z + log(1 − strength) off S: cut tokens keep that share of their weight.

    Strength 0 gives the logits themselves, 1 gives −inf off S.
    """
    if strength == 0:
        return logits_BV
    cut = -math.inf if strength == 1 else math.log1p(-strength)
    return torch.where(keep_BV, logits_BV, logits_BV + cut)


def tempered(logits_BV: Tensor, temperature: float, strength: float) -> Tensor:
    """z / temperature^strength: geometric between none of the temperature and all of it; 0 gives z itself."""
    if strength == 0:
        return logits_BV
    return logits_BV / math.pow(temperature, strength)


def renormalised_logp(logp_NV: Tensor, keep_NV: Tensor) -> Tensor:
    """log p_v − log Σ_{u ∈ S} p_u on S and −inf off it: what a sampler that cuts reports as processed log-probs.

    Any constant on `logp_NV` cancels, so logits will do.
    """
    return torch.log_softmax(logp_NV.masked_fill(~keep_NV, -math.inf), dim=-1)


def pack_support(keep_BV: Tensor) -> Tensor:
    """Ids of the kept tokens, ascending, then −1: int32 (B, K).

    A row that keeps the whole vocabulary holds no id, so that one such row doesn't make all of them V wide; K is the
    largest number of kept tokens in the other rows. A support is never empty.
    """
    keep_BV = keep_BV & ~keep_BV.all(-1, keepdim=True)
    count_B = keep_BV.sum(-1)
    row, token = keep_BV.nonzero(as_tuple=True)
    first_B = count_B.cumsum(0) - count_B
    slot = torch.arange(len(row), device=row.device) - first_B[row]
    slots = int(count_B.max()) if len(row) else 0
    packed = torch.full((len(keep_BV), slots), -1, dtype=torch.int32, device=keep_BV.device)
    packed[row, slot] = token.int()
    return packed


def restricted_logp_BT(logits_BTV: Tensor, support_BTK: Tensor, tokens_BT: Tensor) -> RestrictedLogps:
    """log(e^{z_token} / Σ_{v ∈ S} e^{z_v}), and −Σ_{v ∈ S} p_v log p_v of that distribution.

    A token outside its support has −inf and passes no gradient on. Gradient flows through the logits of S alone.

    Parameters
    ----------
    logits_BTV : float32 (B, T, V)
    support_BTK : int32 (B, T, K)
        See `pack_support`: −1 is no token, and nothing but −1 is the whole vocabulary.
    tokens_BT : int64 (B, T)
    """
    vacant_BTK = support_BTK < 0
    whole_BT = vacant_BTK.all(-1)
    logp_BT, entropy_BT = torch.zeros_like(logits_BTV[..., 0]), torch.zeros_like(logits_BTV[..., 0])
    logp_BT[whole_BT], entropy_BT[whole_BT] = _logp_entropy(logits_BTV[whole_BT], tokens_BT[whole_BT])
    if bool(whole_BT.all()):
        return RestrictedLogps(logp_BT, entropy_BT)
    kept_BTK = logits_BTV.gather(-1, support_BTK.clamp(min=0).long()).masked_fill(vacant_BTK, -math.inf)
    here_NK = (support_BTK == tokens_BT[..., None])[~whole_BT]
    logp_N, entropy_N = _logp_entropy(kept_BTK[~whole_BT], here_NK.int().argmax(-1))
    # NaN is not -inf: a row without numbers has lost every token alike.
    outside_N = ~here_NK.any(-1) & ~logp_N.isnan()
    logp_BT[~whole_BT], entropy_BT[~whole_BT] = logp_N.masked_fill(outside_N, -math.inf), entropy_N
    return RestrictedLogps(logp_BT, entropy_BT)


def _logp_entropy(logits_NV: Tensor, chosen_N: Tensor) -> tuple[Tensor, Tensor]:
    # The steps of `stalefront.policy.token_logps`, so that a whole support changes no bit.
    logp_NV = torch.log_softmax(logits_NV, dim=-1)
    with torch.no_grad():
        entropy_N = torch.special.entr(logp_NV.detach().exp()).sum(-1)
    return logp_NV.gather(-1, chosen_N[:, None]).squeeze(-1), entropy_N


def tail_mass(logp_NV: Tensor, below: float) -> Tensor:
    """Σ p over the tokens with p < `below`: (N,), summed in float64."""
    prob_NV = logp_NV.double().exp()
    # Asked this way round, NaN is counted.
    return torch.where(prob_NV >= below, torch.zeros_like(prob_NV), prob_NV).sum(-1)


def kl_full(logp_NV: Tensor, other_NV: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p (log p − log q) over the vocabulary: nats (N,), summed in float64.

    A token adds 0 where p = 0, and +inf where q = 0 < p.
    """
    logp_NV, other_NV = logp_NV.double(), other_NV.double()
    prob_NV = logp_NV.exp()
    nothing = (prob_NV == 0) & ~other_NV.isnan()
    # Zero before the product, not after: 0 (−inf) would leave NaN in the gradient.
    log_ratio_NV = torch.where(nothing, torch.zeros_like(prob_NV), logp_NV - other_NV)
    return (prob_NV * log_ratio_NV).sum(-1)
