"""An FP8 sampler: e4m3 weights, and activations where asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalefront.mismatch import Rounding

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FP8(Rounding):
    """Values scaled so that the largest one is 448, rounded to e4m3 (3 bits of mantissa), and scaled back.

    Attributes
    ----------
    scale
        One scale a matrix (`tensor`), or one an output channel (`channel`).
    activations : bool
        What goes into a matrix is rounded too, with one scale a token.
    """

    scale: Literal["tensor", "channel"]
    activations: bool

    @property
    def rounds_inputs(self) -> bool:
        """With `activations`."""
        return self.activations

    def rounded(self, weight: Tensor) -> Tensor:
        """See `stalefront.rounding.fp8_e4m3`."""
        from stalefront.rounding import fp8_e4m3

        return fp8_e4m3(weight, self.scale)

    def rounded_input(self, x: Tensor) -> Tensor:
        """One scale a token."""
        from stalefront.rounding import fp8_e4m3

        return fp8_e4m3(x, "channel")
