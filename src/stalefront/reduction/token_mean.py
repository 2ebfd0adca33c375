"""Every token of the batch counts the same (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.reduction import Reduction


@dataclass(frozen=True)
class TokenMean(Reduction):
    """See `stalefront.reduction.reduction_BT`."""

    kind = "token_mean"
