"""The reduction that the loss itself declares."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.reduction import Reduction


@dataclass(frozen=True)
class Own(Reduction):
    """See `stalefront.reduction.reduction_BT`."""

    kind = None
