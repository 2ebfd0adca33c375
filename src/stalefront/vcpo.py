"""Formulas of VCPO (variance-controlled off-policy policy optimisation), as its public code has them.

Notation: w_b = Π_t θ/μ, the importance weight of sequence b, g_b its gradient, R_b its reward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Added to the divisors of the effective sample size and of the baseline; from the public code.
EPSILON = 1e-8


def log_weights_B(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log w, the sum of a sequence's token log-ratios, in float64."""
    return torch.where(mask_BT, log_ratio_BT, torch.zeros_like(log_ratio_BT)).double().sum(-1)


def ess(log_weight_B: Tensor, *, clip: float | None = None) -> float:
    """ESS = (Σw)² / (Σw² + 1e-8), from log w.

    Parameters
    ----------
    clip : float or None
        Upper bound on w; None for none.

    Notes
    -----
    Numerator and denominator are both divided by the largest weight squared, so that no exponential overflows. The
    1e-8 makes the size 0, and not its limit, where all weights vanish.
    """
    log_weight = log_weight_B if clip is None else log_weight_B.clamp(max=math.log(clip))
    top = log_weight.max()
    weight = torch.exp(log_weight - top)
    return float(weight.sum() ** 2 / (weight.square().sum() + EPSILON * torch.exp(-2 * top)))


def lr_scale(ess_share: float, *, base: float, power: float) -> float:
    """min(1, (ESS/B) / base)^power; NaN stays NaN."""
    relative = ess_share / base
    return 1.0 if relative >= 1 else relative**power


def opob_baseline(
    reward_B: Tensor, grad_norm_B: Tensor, weight_B: Tensor | None = None, length_B: Tensor | None = None
) -> float:
    """b = Σ w²‖g‖²R / (Σ w²‖g‖² + 1e-8): the baseline of least variance for weighted gradients (OPOB).

    Parameters
    ----------
    reward_B, grad_norm_B : (B,)
        Rewards and gradient norms of the sequences that share a baseline: a group, or a mini-batch.
    weight_B : (B,), or None
        Importance weights, clipped or not; None counts every sequence alike.
    length_B : (B,), or None
        Tokens of each sequence, where its gradient is that of a mean over them: norms are then divided by it.

    Notes
    -----
    A pure function for comparison with the public code. The learner loop does not use it: it needs the gradient of
    every sequence by itself, a backward pass a sequence.
    """
    importance = grad_norm_B.double().square()
    if weight_B is not None:
        importance = importance * weight_B.double().square()
    if length_B is not None:
        importance = importance / length_B.double().square()
    return float((importance * reward_B.double()).sum() / (importance.sum() + EPSILON))
