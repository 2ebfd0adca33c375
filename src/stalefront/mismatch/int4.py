"""An INT4 sampler: weights alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.choice import OptionError, is_count
from stalefront.mismatch import Rounding

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class INT4(Rounding):
    """Symmetric integers from −7 to 7, one scale an output channel or one a group of inputs.

    Attributes
    ----------
    group_size : int or None
        Inputs that share a scale, a divisor of every matrix's width; None for the whole channel.
    """

    group_size: int | None

    def check(self) -> None:
        """A count."""
        super().check()
        ok = self.group_size is None or is_count(self.group_size)
        self.require(ok, "group_size", "a whole number of at least 1, or null for a whole channel")

    def check_width(self, name: str, width: int) -> None:
        """Groups are whole."""
        if self.group_size is not None and width % self.group_size:
            legal = f"a divisor of {width}, the inputs of {name}, or null"
            raise OptionError(self.key("group_size"), self.group_size, legal, "null takes one scale a channel.")

    def rounded(self, weight: Tensor) -> Tensor:
        """See `stalefront.rounding.integer`."""
        from stalefront.rounding import integer

        return integer(weight, 4, scale="channel", group_size=self.group_size)
