"""Surrogates shared by several losses: pure functions of tensors, one value a token, to be minimised.

Notation: r = exp(log θ/old), A = advantage of the sequence, ε₋ and ε₊ = lower and upper clip width, B sequences,
T tokens. Log-ratios are 0 off the mask (see `LossInputs`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Surrogate(NamedTuple):
    """Loss a token and where its clip is active, by side (all B × T)."""

    token_loss_BT: Tensor
    clip_low_BT: Tensor
    clip_high_BT: Tensor


def clipped(
    log_ratio_BT: Tensor, advantage_B1: Tensor, *, epsilon_low: float, epsilon_high: float, delta: float | None
) -> Surrogate:
    """PPO's clipped surrogate, −min(r A, clip(r, 1 − ε₋, 1 + ε₊) A), optionally with r ≤ δ in the first term.

    Parameters
    ----------
    log_ratio_BT : (B, T) or (B, 1)
        log θ/old of tokens, or of whole sequences.
    advantage_B1 : (B, 1)
    epsilon_low, epsilon_high : float
        Clip widths; infinite for none.
    delta : float or None
        Upper cap on the unclipped ratio (two-sided clipping, INTELLECT-2, arXiv 2505.07291).

    Notes
    -----
    Schulman et al. 2017 (arXiv 1707.06347, eq. 7); GRPO takes it unchanged (arXiv 2402.03300, eq. 3). The clip
    counts as active where it stops the gradient: r < 1 − ε₋ with A < 0, r > 1 + ε₊ with A > 0.
    """
    ratio = torch.exp(log_ratio_BT)
    bounded = torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)
    capped = ratio if delta is None else torch.clamp(ratio, max=delta)
    loss = -torch.min(capped * advantage_B1, bounded * advantage_B1)
    low = (ratio < 1 - epsilon_low) & (advantage_B1 < 0)
    high = (ratio > 1 + epsilon_high) & (advantage_B1 > 0)
    return Surrogate(loss, low, high)


def weighted_logp(logp_theta_BT: Tensor, log_ratio_BT: Tensor, advantage_B1: Tensor, *, cap: float) -> Surrogate:
    """CISPO: −sg[min(r, cap)] A log θ (MiniMax-M1, arXiv 2506.13585, without its lower bound).

    The weight carries no gradient, so a capped token still pulls, with the cap as its weight. `cap` is an absolute
    bound on the weight, as in TRL, not a width around 1.
    """
    ratio = torch.exp(log_ratio_BT).detach()
    loss = -torch.clamp(ratio, max=cap) * advantage_B1 * logp_theta_BT
    high = ratio > cap
    return Surrogate(loss, torch.zeros_like(high), high)


def policy_gradient(logp_theta_BT: Tensor, advantage_B1: Tensor) -> Surrogate:
    """REINFORCE on stale samples: −A log θ, whose gradient −A ∇log θ contains no ratio (Williams 1992)."""
    never = torch.zeros_like(logp_theta_BT, dtype=torch.bool)
    return Surrogate(-advantage_B1 * logp_theta_BT, never, never)


def sequence_log_ratio_B1(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Length-normalised sequence log-ratio, (1/|y|) Σ_t log r_t (GSPO, arXiv 2507.18071): shape (B, 1)."""
    length = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return (log_ratio_BT * mask_BT).sum(-1, keepdim=True) / length


def kl_k3_BT(logp_theta_BT: Tensor, logp_ref_BT: Tensor) -> Tensor:
    """k3 estimate of KL(θ ‖ ref) a token: e^d − d − 1 with d = log ref − log θ (Schulman 2020); never negative."""
    difference = logp_ref_BT - logp_theta_BT
    return torch.exp(difference) - difference - 1
