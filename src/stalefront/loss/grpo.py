"""GRPO: clipped surrogate, mean over each sequence and then over sequences (arXiv 2402.03300, eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.loss import ClippedLoss


@dataclass(frozen=True)
class GRPO(ClippedLoss):
    """(1/B) Σ_b (1/|y_b|) Σ_t −min(r A, clip(r) A)."""

    reduction = "sequence_mean"
