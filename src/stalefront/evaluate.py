"""Rewards as columns: of the rollout batch in use, and of held-out prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stalefront.advantage import Advantages
from stalefront.batch import RolloutBatch

if TYPE_CHECKING:
    from stalefront.build import Parts
    from stalefront.cell import Cell

# Keys the random numbers of validations: another text would move every recorded one.
VALIDATION = "validation 0"


def batch_columns(batch: RolloutBatch, advantages: Advantages) -> dict[str, Any]:
    """Reward, length and signal of a rollout batch; a pass is a reward above 0."""
    reward = batch.reward_B
    return {
        "reward_train": float(reward.mean()),
        "reward_train_n": reward.numel(),
        "reward_train_passes": int((reward > 0).sum()),
        "reward_std_group_mean": float(advantages.reward_std_P.mean()),
        "zero_adv_group_frac": float((advantages.reward_std_P == 0).double().mean()),
        "completion_length_mean": float(batch.mask_BT.sum(-1).double().mean()),
        "truncated_frac": float(batch.truncated_B.double().mean()),
    }


def validate(cell: Cell, parts: Parts, step: int) -> dict[str, Any]:
    """One sampled answer to each held-out prompt, keyed by (seed, step, row)."""
    reward_N = torch.zeros(cell.validation.num_samples, dtype=torch.float64)
    for first_row, rows, prompts in parts.validation:
        samples = parts.sampler.sample(
            parts.model,
            prompts,
            num_generations=1,
            seed=cell.seed,
            purpose=VALIDATION,
            batch=step,
            first_row=first_row,
        )
        reward = cell.task.score(rows, samples.texts, samples.completion_ids)
        reward_N[first_row : first_row + len(rows)] = torch.tensor(reward, dtype=torch.float64)
    # Every row has a reward on one rank and 0 on the others.
    parts.ranks.sum_([reward_N])
    rewards = reward_N.tolist()
    return {
        "reward_val": sum(rewards) / len(rewards),
        "reward_val_n": len(rewards),
        "reward_val_passes": sum(value > 0 for value in rewards),
    }
