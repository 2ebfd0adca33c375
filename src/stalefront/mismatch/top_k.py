"""Sampling from the k most probable tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.choice import is_count
from stalefront.mismatch import Truncation

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.cell import Cell


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

    def refuse(self, cell: Cell) -> None:
        """A vocabulary that is known to be no larger is not cut."""
        super().refuse(cell)
        words = (cell.model.config or {}).get("vocab_size")
        legal = f"below {words}, the size of the vocabulary"
        self.require(not isinstance(words, int) or self.k < words, "k", legal, "Otherwise nothing is cut.")

    def kept_BV(self, logits_BV: Tensor) -> Tensor:
        """See `stalefront.support.top_k_keep_BV`."""
        from stalefront.support import top_k_keep_BV

        return top_k_keep_BV(logits_BV, self.k)
