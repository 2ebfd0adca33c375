"""Seam `reduction`: how token losses become one number, and what tokens that corrections reject mean for it.

loss = Σ_bt reduction_BT · token_loss_BT. The weights depend on the mask of the *whole* batch of a learner step;
a micro-batch takes its rows of them, and the gradients of all micro-batches add up exactly to the batch's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from stalefront.choice import Choice

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Kind = Literal[
    "sequence_mean", "token_mean", "constant", "token_sum", "sequence_sum", "prompt_mean", "micro_batch_mean"
]


@dataclass(frozen=True)
class Reduction(Choice):
    """A reduction, and what rejection does to it.

    Attributes
    ----------
    denominator
        `valid`: tokens that corrections reject still count where a loss is divided by a number of tokens or sequences;
        `kept`: they do not. The same rate of rejection then changes the effective learning rate, or does not.
    advantages_over
        `all`: a group's baseline holds every sample; `kept`: only those of which a correction left a token.
    skip_empty : bool
        A sequence without any token left does not count as a sequence.
    epsilon : float
        Added to the divisor, as some frameworks have it.
    epsilon_on
        Which counts it is added to: those of tokens, of sequences, or both; frameworks differ in this too.
    """

    denominator: Literal["valid", "kept"]
    advantages_over: Literal["all", "kept"]
    skip_empty: bool
    epsilon: float
    epsilon_on: Literal["both", "tokens", "sequences"]

    kind: ClassVar[Kind | None]

    def check(self) -> None:
        """Epsilon is a small number."""
        self.require(math.isfinite(self.epsilon) and self.epsilon >= 0, "epsilon", "a finite number of at least 0")

    def weights_BT(
        self,
        mask_BT: Tensor,
        own: Kind,
        *,
        max_completion_length: int,
        group_B: Tensor | None = None,
        micro_batch_B: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Weight of every token's loss; `own` is the reduction of the loss, which the choice `own` takes."""
        return reduction_BT(
            mask_BT,
            self.kind or own,
            max_completion_length=self.length or max_completion_length,
            group_B=group_B,
            micro_batch_B=micro_batch_B,
            skip_empty=self.skip_empty,
            token_epsilon=0.0 if self.epsilon_on == "sequences" else self.epsilon,
            sequence_epsilon=0.0 if self.epsilon_on == "tokens" else self.epsilon,
            dtype=dtype,
        )

    @property
    def length(self) -> int | None:
        """Divisor of `constant` in place of the task's `max_completion_length`; None for that."""
        return None


def reduction_BT(
    mask_BT: Tensor,
    kind: Kind,
    *,
    max_completion_length: int,
    group_B: Tensor | None = None,
    micro_batch_B: Tensor | None = None,
    skip_empty: bool = False,
    token_epsilon: float = 0.0,
    sequence_epsilon: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Weight of every token's loss.

    Parameters
    ----------
    mask_BT : bool (B, T)
        Completion tokens, less those that are not to count.
    kind
        `sequence_mean` 1/(B · |y_b|): mean over a sequence, then over sequences (GRPO, arXiv 2402.03300, eq. 3);
        `token_mean` 1/Σ|y|: every token counts the same (DAPO, arXiv 2503.14476);
        `constant` 1/(B · L) with L = `max_completion_length`: no length enters (Dr. GRPO, arXiv 2503.20783);
        `token_sum` 1; `sequence_sum` 1/B: sum over a sequence, mean over sequences;
        `prompt_mean` 1/(P · Σ_{b in group} |y_b|): token mean of each prompt, then over the P prompts;
        `micro_batch_mean` 1/(M · Σ_{b in micro-batch} |y_b|): the same over the M micro-batches.
    group_B, micro_batch_B : int64 (B,)
        Prompt, and micro-batch, that a sequence belongs to; needed by the last two.
    skip_empty : bool
        B, and P, count only what has a token.
    token_epsilon, sequence_epsilon : float
        Added to every count of tokens, and of sequences, that is divided by.
    dtype
        Precision of the weights; None for float32.

    Notes
    -----
    A sequence without a completion token has weight 0 everywhere and still counts in B unless `skip_empty`. Counts of
    nothing are taken as 1, so that nothing is divided by zero.
    """
    mask = mask_BT.float() if dtype is None else mask_BT.to(dtype)
    length_B1 = mask.sum(-1, keepdim=True)
    rows = float((length_B1 > 0).sum()) if skip_empty else float(mask_BT.shape[0])
    sequences = max(rows, 1.0) if sequence_epsilon == 0 else rows + sequence_epsilon
    if kind == "token_sum":
        return mask
    if kind == "sequence_sum":
        return mask / sequences
    if kind == "sequence_mean":
        return mask / (_count(length_B1, token_epsilon) * sequences)
    if kind == "token_mean":
        return mask / _count(mask.sum(), token_epsilon)
    if kind == "constant":
        return mask / (sequences * max_completion_length)
    members = group_B if kind == "prompt_mean" else micro_batch_B
    assert members is not None, f"{kind} needs to know which sequences belong together"
    return _mean_of_means(mask, length_B1, members, skip_empty=skip_empty, epsilon=token_epsilon)


def _count(number: Tensor, epsilon: float) -> Tensor:
    return number.clamp(min=1) if epsilon == 0 else number + epsilon


def _mean_of_means(mask: Tensor, length_B1: Tensor, member_B: Tensor, *, skip_empty: bool, epsilon: float) -> Tensor:
    """Token mean of each set of sequences, then the mean over sets."""
    import torch

    _, index_B = torch.unique(member_B, return_inverse=True)
    tokens = torch.zeros(int(index_B.max()) + 1, dtype=mask.dtype, device=mask.device)
    tokens = tokens.index_add(0, index_B, length_B1[:, 0])
    sets = int((tokens > 0).sum()) if skip_empty else tokens.numel()
    return mask / (_count(tokens, epsilon)[index_B][:, None] * max(sets, 1))
