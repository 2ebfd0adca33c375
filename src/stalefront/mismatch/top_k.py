"""Sampling from the k most probable tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.choice import is_count
from stalefront.mismatch import Truncation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TopK(Truncation):
    """Only the `k` most probable tokens are drawn from; of equal ones those with the lowest ids.

    Attributes
    ----------
    k : int
        Tokens that are kept.
    """

    k: int

    def check(self) -> None:
        """A count."""
        super().check()
        self.require(is_count(self.k), "k", "a whole number of at least 1")

    def kept_BV(self, logits_BV: Tensor) -> Tensor:
        """See `stalefront.support.top_k_keep_BV`."""
        from stalefront.support import top_k_keep_BV

        return top_k_keep_BV(logits_BV, self.k)
