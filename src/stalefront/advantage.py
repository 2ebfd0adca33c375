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
    reward_B: Tensor, *, num_generations: int, scale_rewards: Literal["group", "batch", "none"]
) -> Advantages:
    """A_i = (R_i − mean of its group) / (σ + 1e-4) (GRPO, arXiv 2402.03300, §4.1.2).

    Parameters
    ----------
    reward_B : (B,)
        Rewards, the `num_generations` samples of a prompt next to one another.
    scale_rewards
        σ is the sample standard deviation (n − 1) of the group, of the batch, or `none` for no division
        (Dr. GRPO, arXiv 2503.20783).

    Notes
    -----
    A group of equal rewards has advantage exactly 0 and gives no gradient. With one sample a group σ is undefined
    and taken as 0. Non-finite rewards go through as they are.
    """
    reward_PG = reward_B.double().view(-1, num_generations)
    centred = reward_PG - reward_PG.mean(dim=1, keepdim=True)
    std_P = _std(reward_PG, dim=1)
    if scale_rewards == "group":
        centred = centred / (std_P[:, None] + STD_EPSILON)
    elif scale_rewards == "batch":
        centred = centred / (_std(reward_B.double(), dim=0) + STD_EPSILON)
    return Advantages(centred.reshape(-1).float(), std_P)


def _std(values: Tensor, dim: int) -> Tensor:
    if values.shape[dim] < 2:
        return torch.zeros_like(values.mean(dim=dim))
    return values.std(dim=dim)
