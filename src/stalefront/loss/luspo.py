"""LUSPO: GSPO whose sequences weigh by their length, so that long answers are not held back."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.loss.gspo import GSPO


@dataclass(frozen=True)
class LUSPO(GSPO):
    """(1/B) Σ_b |y_b| · −min(s A, clip(s) A): GSPO without the division by |y_b|.

    Source: TRL's `loss_type="luspo"` at sequence level. On-policy a token's gradient is −A/B, whatever the length.
    """

    reduction = "sequence_sum"
