"""Importance sampling without clip or mask: unbiased, and of unbounded variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.loss import RatioLoss

if TYPE_CHECKING:
    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class Importance(RatioLoss):
    """(1/Σ|y|) Σ_bt −r A, with r = θ/μ by default; Tinker's `importance_sampling`, which sums instead."""

    reduction = "token_mean"

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """Nothing is ever clipped."""
        import torch

        from stalefront.surrogate import unclipped

        return unclipped(-torch.exp(self.kept_log_ratio_BT(inputs)) * inputs.advantage_B1)
