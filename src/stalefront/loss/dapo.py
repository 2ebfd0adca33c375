"""DAPO's reduction: clipped surrogate, mean over all tokens of the batch (arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.loss import ClippedLoss


@dataclass(frozen=True)
class DAPO(ClippedLoss):
    """(1/Σ|y|) Σ_bt −min(r A, clip(r) A); DAPO's other parts (clip-higher, dynamic sampling) are separate options."""

    reduction = "token_mean"
