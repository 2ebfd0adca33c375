"""Dr. GRPO: clipped surrogate, sum divided by a constant length, so that length bias is gone (arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.loss import ClippedLoss


@dataclass(frozen=True)
class DrGRPO(ClippedLoss):
    """(1/(B L)) Σ_bt −min(r A, clip(r) A) with L = `task.max_completion_length`.

    The paper also leaves advantages undivided: set `loss.scale_rewards=none` for that.
    """

    reduction = "constant"
