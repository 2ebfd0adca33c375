"""A sampler in float16: parameters, activations, cache and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stalefront.mismatch import HalfPath


@dataclass(frozen=True)
class FP16(HalfPath):
    """True float16 (11 bits of mantissa, largest value 65504): what overflows is recorded as it comes."""

    @property
    def dtype(self) -> torch.dtype:
        """The type."""
        return torch.float16
