"""Nucleus sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.mismatch import Truncation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TopP(Truncation):
    """Only the smallest set of most probable tokens whose mass reaches `p` is drawn from.

    Attributes
    ----------
    p : float
        Mass that is kept.
    """

    p: float

    def check(self) -> None:
        """A share that cuts something."""
        super().check()
        self.require(0 < self.p < 1, "p", "a share above 0 and below 1", "mismatch=[none] keeps all.")

    def kept_BV(self, logits_BV: Tensor) -> Tensor:
        """See `stalefront.support.top_p_keep_BV`."""
        from stalefront.support import top_p_keep_BV

        return top_p_keep_BV(logits_BV, self.p)
