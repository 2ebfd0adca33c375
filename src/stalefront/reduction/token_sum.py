"""Sum over all tokens, divided by a fixed number: the step grows with the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stalefront.reduction import Reduction

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.reduction import Kind


@dataclass(frozen=True)
class TokenSum(Reduction):
    """1/divisor a token.

    Attributes
    ----------
    divisor : float
        A number that no mask enters: a batch size, a count of tokens that is known beforehand; 1 for the plain sum.
    """

    divisor: float

    kind = "token_sum"

    def check(self) -> None:
        """A divisor is a positive number."""
        super().check()
        self.require(0 < self.divisor < math.inf, "divisor", "a finite number above 0", "1 is the plain sum.")

    def weights_BT(self, mask_BT: Tensor, own: Kind, **batch: Any) -> Tensor:
        """See `Reduction`."""
        return super().weights_BT(mask_BT, own, **batch) / self.divisor
