"""Token-level truncated importance sampling: each token's loss times its capped ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.correction import Correction

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs, Weights


def truncated_ratio(log_ratio_BT: Tensor, *, cap: float) -> Tensor:
    """w = min(exp(log-ratio), C), the capped ratio of every token.

    Ionides 2008, Truncated Importance Sampling; per token in RL post-training: Yao et al. 2025. At a log-ratio of
    +inf the weight is C, at −inf it is 0.
    """
    return log_ratio_BT.exp().clamp(max=cap)


@dataclass(frozen=True)
class TokenTIS(Correction):
    """w_t = sg[min(ratio_t, cap)]; nothing is rejected, so denominators stay.

    `anchor=theta/mu` corrects for lag (and mismatch) and belongs on a surrogate without a ratio of its own;
    `anchor=old/mu` corrects for mismatch and composes with a clipped surrogate on theta/old.
    """

    cap: float

    level = "token"
    statistic = "ratio"
    kept_weight = "ratio"

    def check(self) -> None:
        """A cap below 1 would shrink on-policy weights."""
        self.require(self.cap >= 1, "cap", "a number of at least 1, or inf", "2 is the common value.")

    def __call__(self, inputs: LossInputs) -> Weights:
        """One weight a token; everything is kept."""
        import torch

        from stalefront.batch import Weights

        weight = truncated_ratio(inputs.anchored_BT(self.anchor), cap=self.cap)
        return Weights(weight, torch.ones_like(inputs.mask_BT), 1.0)
