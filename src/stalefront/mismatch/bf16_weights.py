"""Weights rounded to bfloat16, everything computed in the model's type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stalefront.mismatch import Rounding

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BF16Weights(Rounding):
    """What a weight push in bfloat16 does; cheap where bfloat16 itself is slow, and not the same as `bf16`."""

    def rounded(self, weight: Tensor) -> Tensor:
        """Nearest bfloat16, ties to even."""
        from stalefront.rounding import cast

        return cast(weight, torch.bfloat16)
