"""How far the policy moved on a token, and where a trust region ends: pure functions, shared by several losses.

Notation: p = e^{log p} is the probability of the sampled token, θ the policy being updated, b a base policy; the other
tokens are one event of probability 1 − p (a Bernoulli variable). Everything here is detached by its callers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def probability_shift(logp: Tensor, logp_base: Tensor) -> Tensor:
    """p − p_b, from logarithms without cancellation: ±e^{max} (1 − e^{min − max})."""
    top, bottom = torch.maximum(logp, logp_base), torch.minimum(logp, logp_base)
    size = -torch.expm1(bottom - top) * torch.exp(top)
    return torch.where(logp >= logp_base, size, -size)


def bernoulli_kl(logp_base: Tensor, logp: Tensor, smoothing: float) -> Tensor:
    """KL(b ‖ θ) of the two Bernoulli variables: p_b log(p_b/p) + (1 − p_b) log((1 − p_b + s)/(1 − p + s)).

    `smoothing` s keeps the second term finite where a probability is 1.
    """
    base = torch.exp(logp_base)
    rest = torch.log((1 - base + smoothing) / (1 - torch.exp(logp) + smoothing))
    return base * (logp_base - logp) + (1 - base) * rest


def second_moment_bound_nats(square: Tensor, budget: float) -> float:
    """τ of M2PO: the largest |log r| among harmful tokens for which the winsorised second moment stays in the budget.

    With v₁ ≤ … ≤ v_n the squared log-ratios, the exact solution of mean(min(v, τ²)) = budget lies between two of them,
    v_{k−1} ≤ τ² ≤ v_k; τ² = v_{k−1} is taken (Infini-AI-Lab/M2PO, paper arXiv 2510.01161). Infinite where the mean of v
    does not exceed the budget, 0 where even v₁ does.

    Parameters
    ----------
    square : (n,)
        Squared log-ratios of the harmful tokens.
    budget : nats²
    """
    count = square.numel()
    if count == 0:
        return math.inf
    tiny = 1e-12  # the reference's own slack, which decides ties
    ascending = torch.sort(square.detach().double()).values
    if float(ascending.sum()) / count <= budget + tiny:
        return math.inf
    left = torch.arange(count - 1, -1, -1, device=square.device)
    winsorised = (ascending - tiny) * left + torch.cumsum(ascending, 0)
    reached = torch.nonzero(~(winsorised < budget * count - tiny))
    first = int(reached[0])
    return math.sqrt(max(float(ascending[first - 1]) - tiny, 0.0)) if first else 0.0


def prefix_mean(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the tokens of a sequence up to and with t, as far as `mask_BT` holds: (1/n_t) Σ_{s ≤ t} value_s."""
    held = torch.where(mask_BT, value_BT, torch.zeros_like(value_BT))
    return held.cumsum(-1) / mask_BT.cumsum(-1).clamp(min=1)
