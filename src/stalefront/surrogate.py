"""Surrogates shared by several losses: pure functions of tensors, one value a token, to be minimised.

Notation: r = exp(log θ/old), A = advantage of the sequence, ε₋ and ε₊ = lower and upper clip width, B sequences,
T tokens. Log-ratios are 0 off the mask (see `LossInputs`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stalefront.ratios import over_sequence


class Surrogate(NamedTuple):
    """Loss a token and where its clip is active, by side (all B × T)."""

    token_loss_BT: Tensor
    clip_low_BT: Tensor
    clip_high_BT: Tensor


def clipped(
    log_ratio_BT: Tensor,
    advantage_B1: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
    value_cap: float | None = None,
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
    dual_clip : float or None
        c of dual clipping, −max(min(…), c A) where A < 0 (Ye et al. 2020, arXiv 1912.09729).
    value_cap : float or None
        Upper cap on the ratio's value from the start, which leaves its gradient: see `value_capped`.

    Notes
    -----
    Schulman et al. 2017 (arXiv 1707.06347, eq. 7); GRPO takes it unchanged (arXiv 2402.03300, eq. 3). The clip
    counts as active where it stops the gradient: r < 1 − ε₋ with A < 0, r > 1 + ε₊ with A > 0.
    """
    ratio = value_capped(log_ratio_BT, value_cap)
    bounded = torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)
    capped = ratio if delta is None else torch.clamp(ratio, max=delta)
    loss = -torch.min(capped * advantage_B1, bounded * advantage_B1)
    if dual_clip is not None:
        loss = torch.where(advantage_B1 < 0, torch.min(loss, -dual_clip * advantage_B1), loss)
    low = (ratio < 1 - epsilon_low) & (advantage_B1 < 0)
    high = (ratio > 1 + epsilon_high) & (advantage_B1 > 0)
    return Surrogate(loss, low, high)


def value_capped(log_ratio_BT: Tensor, cap: float | None) -> Tensor:
    """r = e^l whose value is at most `cap`, and whose derivative with respect to l is then `cap` and not 0.

    A clamp would make the token's gradient vanish; here a capped token still pulls, with the cap as its weight.
    """
    if cap is None or math.isinf(cap):
        return torch.exp(log_ratio_BT)
    limit = math.log(cap)
    carried = limit + (log_ratio_BT - log_ratio_BT.detach())
    return torch.exp(torch.where(log_ratio_BT.detach() > limit, carried, log_ratio_BT))


def weighted_logp(logp_theta_BT: Tensor, weight_BT: Tensor, advantage_B1: Tensor) -> Tensor:
    """−sg[w] A log θ a token. A weight of exactly 0 gives 0 even at log θ = −∞: w log θ → 0 with r → 0, and a rejected
    token is out of the loss whatever it holds.
    """
    weight = weight_BT.detach()
    loss = -weight * advantage_B1 * logp_theta_BT
    return torch.where(weight == 0, torch.zeros_like(loss), loss)


def clamped_weight(
    logp_theta_BT: Tensor, log_ratio_BT: Tensor, advantage_B1: Tensor, *, floor: float, cap: float
) -> Surrogate:
    """−sg[clamp(r, floor, cap)] A log θ: CISPO (MiniMax-M1, arXiv 2506.13585), AIPO (LlamaRL, arXiv 2505.24034).

    The weight carries no gradient, so a capped token still pulls, with the cap as its weight. Both bounds are weights
    themselves, not widths around 1.
    """
    ratio = torch.exp(log_ratio_BT).detach()
    loss = weighted_logp(logp_theta_BT, torch.clamp(ratio, floor, cap), advantage_B1)
    return Surrogate(loss, ratio < floor, ratio > cap)


def unclipped(token_loss_BT: Tensor) -> Surrogate:
    """A surrogate without any clip."""
    never = torch.zeros_like(token_loss_BT, dtype=torch.bool)
    return Surrogate(token_loss_BT, never, never)


def safe_log(value: float) -> float:
    """log of a bound that may be 0 or infinite."""
    return math.log(value) if value > 0 else -math.inf


def policy_gradient(logp_theta_BT: Tensor, advantage_B1: Tensor) -> Surrogate:
    """REINFORCE on stale samples: −A log θ, whose gradient −A ∇log θ contains no ratio (Williams 1992)."""
    return unclipped(-advantage_B1 * logp_theta_BT)


def sequence_log_ratio_B1(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Length-normalised sequence log-ratio, (1/|y|) Σ_t log r_t (GSPO, arXiv 2507.18071): shape (B, 1)."""
    return over_sequence(log_ratio_BT, mask_BT, "mean")


def gradient_carrier(logp_theta_BT: Tensor) -> Tensor:
    """0 with derivative 1: added to a detached logarithm, it sends the gradient to each token's own log θ."""
    difference = logp_theta_BT - logp_theta_BT.detach()
    return torch.where(torch.isinf(logp_theta_BT.detach()), torch.zeros_like(difference), difference)


def kl_k3_BT(logp_theta_BT: Tensor, logp_ref_BT: Tensor) -> Tensor:
    """k3 estimate of KL(θ ‖ ref) a token: e^d − d − 1 with d = log ref − log θ (Schulman 2020); never negative."""
    difference = logp_ref_BT - logp_theta_BT
    return torch.exp(difference) - difference - 1
