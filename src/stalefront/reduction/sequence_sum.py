"""Sum over a sequence, mean over sequences: long answers count more."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.reduction import Reduction


@dataclass(frozen=True)
class SequenceSum(Reduction):
    """See `stalefront.reduction.reduction_BT`."""

    kind = "sequence_sum"
