"""Group-relative advantages."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

# Added to the standard deviation before dividing; TRL's value, so that the two agree.
STD_EPSILON = 1e-4


class Advantages(NamedTuple):
    """Advantage of every sequence (float32, B) and the spread of reward within every group (P)."""

    advantage_B: Tensor
    reward_std_P: Tensor


def group_advantages(
    reward_B: Tensor,
    *,
    num_generations: int,
    scale_rewards: Literal["group", "batch", "none"],
    keep_B: Tensor | None = None,
) -> Advantages:
    """A_i = (R_i − mean of its group) / (σ + 1e-4) (GRPO, arXiv 2402.03300, §4.1.2).

    Parameters
    ----------
    reward_B : (B,)
        Rewards, the `num_generations` samples of a prompt next to one another.
    scale_rewards
        σ is the sample standard deviation (n − 1) of the group, of the batch, or `none` for no division
        (Dr. GRPO, arXiv 2503.20783).
    keep_B : bool (B,), or None
        Samples that mean and σ are taken over; the others have advantage 0. None for all.

    Notes
    -----
    A group of equal rewards has advantage exactly 0 and gives no gradient. With one sample a group σ is undefined
    and taken as 0. Non-finite rewards go through as they are. A group with one kept
    sample has no baseline to compare it with, so that its advantage is 0.
    """
    if keep_B is not None and not bool(keep_B.all()):
        return _over_kept(reward_B, keep_B, num_generations, scale_rewards)
    reward_PG = reward_B.double().view(-1, num_generations)
    centred = reward_PG - reward_PG.mean(dim=1, keepdim=True)
    std_P = _std(reward_PG, dim=1)
    if scale_rewards == "group":
        centred = centred / (std_P[:, None] + STD_EPSILON)
    elif scale_rewards == "batch":
        centred = centred / (_std(reward_B.double(), dim=0) + STD_EPSILON)
    return Advantages(centred.reshape(-1).float(), std_P)


def _over_kept(
    reward_B: Tensor, keep_B: Tensor, num_generations: int, scale_rewards: Literal["group", "batch", "none"]
) -> Advantages:
    """The same with means and deviations over kept samples alone."""
    advantage_B = torch.zeros_like(reward_B, dtype=torch.float32)
    whole, std = _std(reward_B[keep_B].double(), dim=0) if keep_B.any() else None, []
    for rows in torch.arange(len(reward_B), device=reward_B.device).view(-1, num_generations):
        rows = rows[keep_B[rows]]
        reward = reward_B[rows].double()
        std.append(_std(reward, dim=0) if len(rows) else reward.new_zeros(()))
        centred = reward - reward.mean()
        if scale_rewards == "group":
            centred = centred / (std[-1] + STD_EPSILON)
        elif scale_rewards == "batch" and whole is not None:
            centred = centred / (whole + STD_EPSILON)
        advantage_B[rows] = centred.float()
    return Advantages(advantage_B, torch.stack(std))


def _std(values: Tensor, dim: int) -> Tensor:
    if values.shape[dim] < 2:
        return torch.zeros_like(values.mean(dim=dim))
    return values.std(dim=dim)
