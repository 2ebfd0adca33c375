"""V-trace targets and their truncated trace: value targets from off-policy trajectories, as reference functions.

Notation: R = π/μ, the ratio of the policy that is valued to the one that sampled; ρ = min(ρ̄, R); c = λ min(c̄, R);
V_t = value before token t; r_t = reward on token t; δ_t = r_t + γ V_{t+1} − V_t; B sequences, T tokens. Tokens off the
mask are no steps: what follows a hole follows the token before it. Nothing here is differentiated.

No loss of the grid has a critic: these functions are there to compute targets from records, and to test against.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Steps(NamedTuple):
    """Valid tokens moved to the left, in order; 0 behind them, so that nothing flows back from there.

    `trace_BT` is γ c, and `excess_BT` is ρ δ; `order_BT` says where a step lies in the batch.
    """

    value_BT: Tensor
    reward_BT: Tensor
    trace_BT: Tensor
    excess_BT: Tensor
    next_value_BT: Tensor
    valid_BT: Tensor
    order_BT: Tensor


def vtrace_targets(
    log_ratio_BT: Tensor,
    reward_BT: Tensor,
    value_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    bootstrap_B: Tensor | None = None,
    horizon: int | None = None,
) -> Tensor:
    """v_s = V_s + Σ_{t ≥ s} γ^{t−s} (Π_{i=s}^{t−1} c_i) ρ_t δ_t: (B, T), 0 off the mask.

    IMPALA, arXiv 1802.01561, eq. 1.

    Parameters
    ----------
    log_ratio_BT : nats
        log R.
    reward_BT, value_BT : (B, T)
    mask_BT : bool (B, T)
    bootstrap_B : (B,) or None
        Value after the last token; 0 where an answer ends there.
    horizon : int or None
        k of BRACE (arXiv 2609.09783), as public notes give it: the trace runs over k tokens, j = s + k, and what lies
        behind is the plain return with weight 1, v_s = V_s + Σ_{s ≤ t < j} γ^{t−s} (Π c) ρ_t δ_t +
        γ^{j−s} (Π_{i=s}^{j−1} c_i) (G_j − V_j), with G_j = Σ_{t ≥ j} γ^{t−j} r_t. None for no end.
    """
    steps = _steps(log_ratio_BT, reward_BT, value_BT, mask_BT, gamma, lambda_, rho_bar, c_bar, bootstrap_B)
    last = steps.next_value_BT[:, -1]
    if horizon is None:
        correction = _backwards(steps.excess_BT, steps.trace_BT)
    else:
        correction = _truncated(steps, gamma, horizon, last)
    target_BT = torch.where(steps.valid_BT, steps.value_BT + correction, torch.zeros_like(correction))
    return torch.zeros_like(target_BT).scatter(-1, steps.order_BT, target_BT)


def _steps(
    log_ratio_BT: Tensor,
    reward_BT: Tensor,
    value_BT: Tensor,
    mask_BT: Tensor,
    gamma: float,
    lambda_: float,
    rho_bar: float,
    c_bar: float,
    bootstrap_B: Tensor | None,
) -> Steps:
    order = torch.argsort(~mask_BT, dim=-1, stable=True)
    valid = mask_BT.gather(-1, order)
    zero = torch.zeros_like(value_BT)
    value, reward = (torch.where(valid, x.gather(-1, order), zero) for x in (value_BT, reward_BT))
    ratio = torch.where(valid, log_ratio_BT.gather(-1, order), zero).exp()
    after = zero[:, 0] if bootstrap_B is None else bootstrap_B.to(value.dtype)
    following = torch.cat([value[:, 1:], zero[:, :1]], dim=-1)
    is_last = valid & ~torch.cat([valid[:, 1:], torch.zeros_like(valid[:, :1])], dim=-1)
    following = torch.where(is_last | ~valid, after[:, None], following)
    excess = ratio.clamp(max=rho_bar) * (reward + gamma * following - value)
    trace = gamma * lambda_ * ratio.clamp(max=c_bar)
    trace, excess = (torch.where(valid, x, zero) for x in (trace, excess))
    return Steps(value, reward, trace, excess, following, valid, order)


def _backwards(added_BT: Tensor, factor_BT: Tensor, after_B: Tensor | None = None) -> Tensor:
    """x_s = added_s + factor_s x_{s+1}, from x_T = `after_B`."""
    carried = torch.zeros_like(added_BT[:, 0]) if after_B is None else after_B
    columns = []
    for t in reversed(range(added_BT.shape[1])):
        carried = added_BT[:, t] + factor_BT[:, t] * carried
        columns.append(carried)
    return torch.stack(columns[::-1], dim=-1)


def _truncated(steps: Steps, gamma: float, horizon: int, after_B: Tensor) -> Tensor:
    """Sum over the first k tokens, and the return behind them."""
    # Behind the last token the return is the bootstrap and so is the value: the tail there is 0.
    one = torch.ones_like(steps.trace_BT)
    discount = torch.where(steps.valid_BT, gamma * one, one)
    tail = _backwards(steps.reward_BT, discount, after_B)
    ahead = torch.where(steps.valid_BT, tail - steps.value_BT, torch.zeros_like(tail))
    total, weight, trace, excess = torch.zeros_like(one), one, steps.trace_BT, steps.excess_BT
    for _ in range(min(horizon, one.shape[1])):
        total = total + weight * excess
        weight = weight * trace
        trace, excess, ahead = (_next(x) for x in (trace, excess, ahead))
    return total + weight * ahead


def _next(value_BT: Tensor) -> Tensor:
    """Each place holds what the one after it held; 0 at the end."""
    return torch.cat([value_BT[:, 1:], torch.zeros_like(value_BT[:, :1])], dim=-1)


def vtrace_advantages(
    log_ratio_BT: Tensor,
    reward_BT: Tensor,
    value_BT: Tensor,
    target_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    rho_bar: float = 1.0,
    bootstrap_B: Tensor | None = None,
) -> Tensor:
    """ρ_s (r_s + γ v_{s+1} − V_s), the policy-gradient advantage of IMPALA's section 4.2: (B, T), 0 off the mask."""
    # With v in the place of V, δ is r_s + γ v_{s+1} − v_s, and ρ (v_s − V_s) is what it lacks.
    steps = _steps(log_ratio_BT, reward_BT, target_BT, mask_BT, gamma, 1.0, rho_bar, 1.0, bootstrap_B)
    advantage = torch.zeros_like(value_BT).scatter(-1, steps.order_BT, steps.excess_BT)
    ratio = torch.where(mask_BT, log_ratio_BT, torch.zeros_like(log_ratio_BT)).exp().clamp(max=rho_bar)
    return torch.where(mask_BT, advantage + ratio * (target_BT - value_BT), torch.zeros_like(advantage))
