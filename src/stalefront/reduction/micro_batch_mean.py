"""Token mean of each micro-batch, then over micro-batches: the value depends on how a batch is split."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.reduction import Reduction


@dataclass(frozen=True)
class MicroBatchMean(Reduction):
    """See `stalefront.reduction.reduction_BT`."""

    kind = "micro_batch_mean"
