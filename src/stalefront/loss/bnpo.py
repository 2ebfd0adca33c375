"""BNPO as TRL names it: clipped surrogate, mean over the tokens of the batch a gradient is taken on."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.loss import ClippedLoss


@dataclass(frozen=True)
class BNPO(ClippedLoss):
    """(1/Σ|y|) Σ_bt −min(r A, clip(r) A).

    TRL divides every micro-batch by its own token count, so its value depends on how a batch is split; here a batch
    is divided by the tokens of the whole batch, and splitting changes nothing. With one micro-batch the two agree,
    and `bnpo` and `dapo` are then the same loss.
    """

    reduction = "token_mean"
