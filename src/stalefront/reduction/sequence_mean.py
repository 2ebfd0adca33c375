"""Mean over a sequence, then over sequences (GRPO, arXiv 2402.03300, eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.reduction import Reduction


@dataclass(frozen=True)
class SequenceMean(Reduction):
    """See `stalefront.reduction.reduction_BT`."""

    kind = "sequence_mean"
