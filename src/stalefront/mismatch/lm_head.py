"""A language-model head in another precision than the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.functional import linear

from stalefront.mismatch import Mismatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LMHead(Mismatch):
    """Logits ℓ + strength · (ℓ′ − ℓ), where ℓ′ is the head's product in `dtype`.

    Attributes
    ----------
    dtype
        Type of the hidden state, the head's weights and their product.
    """

    dtype: Literal["bfloat16", "float16", "float32"]

    place = "head"

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, plain: Tensor) -> Tensor:
        """Logits of `hidden` (…, in) under `weight` (V, in), where the model's own are `plain`; float32."""
        from stalefront.rounding import blended

        dtype: torch.dtype = getattr(torch, self.dtype)
        offset = None if bias is None else bias.to(dtype)
        other = linear(hidden.to(dtype), weight.to(dtype), offset)
        return blended(plain.float(), other.float(), self.strength)
