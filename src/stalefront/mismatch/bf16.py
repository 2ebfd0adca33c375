"""A sampler in bfloat16: parameters, activations, cache and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stalefront.mismatch import HalfPath


@dataclass(frozen=True)
class BF16(HalfPath):
    """True bfloat16 (8 bits of mantissa), as inference engines run; `bf16_weights` rounds the weights alone."""

    @property
    def dtype(self) -> torch.dtype:
        """The type."""
        return torch.bfloat16
