"""An INT8 sampler: weights alone, or activations quantised on the fly too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalefront.mismatch import Rounding

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class INT8(Rounding):
    """Symmetric integers from −127 to 127.

    Attributes
    ----------
    scale
        One scale a matrix (`tensor`), or one an output channel (`channel`).
    dynamic : bool
        What goes into a matrix is quantised too, with one scale a token found on the fly.
    """

    scale: Literal["tensor", "channel"]
    dynamic: bool

    @property
    def rounds_inputs(self) -> bool:
        """With `dynamic`."""
        return self.dynamic

    def rounded(self, weight: Tensor) -> Tensor:
        """See `stalefront.rounding.integer`."""
        from stalefront.rounding import integer

        return integer(weight, 8, scale=self.scale)

    def rounded_input(self, x: Tensor) -> Tensor:
        """One scale a token."""
        from stalefront.rounding import integer

        return integer(x, 8, scale="channel")
