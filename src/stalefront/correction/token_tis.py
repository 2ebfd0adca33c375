"""Token-level truncated importance sampling: each token's loss times its capped ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.correction import TruncatedRatio

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs, Weights


def truncated_ratio(log_ratio: Tensor, *, cap: float, floor: float = 0.0) -> Tensor:
    """w = max(min(exp(log-ratio), cap), floor), the truncated ratio of every token, segment or sequence.

    Ionides 2008, Truncated Importance Sampling; per token in RL post-training: Yao et al. 2025. At a log-ratio of
    +inf the weight is the cap, at −inf it is the floor.
    """
    return log_ratio.exp().clamp(min=floor, max=cap)


@dataclass(frozen=True)
class TokenTIS(TruncatedRatio):
    """w_t = sg[clamp(ratio_t, floor, cap)]; nothing is rejected, so denominators stay.

    `anchor=theta/mu` corrects for lag (and mismatch) and belongs on a surrogate without a ratio of its own;
    `anchor=old/mu` corrects for mismatch and composes with a clipped surrogate on theta/old. With an infinite cap the
    weight is the ratio itself.
    """

    level = "token"
    looks_at = "ratio"

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """One weight a token; everything is kept."""
        return so_far.times(truncated_ratio(self.log_ratio_BT(inputs), cap=self.cap, floor=self.floor))
