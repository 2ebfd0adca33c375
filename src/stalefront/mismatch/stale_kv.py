"""A prefix cache that is not cleared when new weights arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.choice import OptionError, is_count
from stalefront.mismatch import Mismatch

if TYPE_CHECKING:
    from stalefront.cell import Cell


@dataclass(frozen=True)
class StaleKV(Mismatch):
    """Keys and values of all but a prompt's last token are those of older weights: K + strength · (K_old − K).

    The log-probs are what the sampler truly drew from; no forward of any one version gives them, so the difference
    lies in old/μ. `kv_stale_frac` records the share of tokens sampled that way: none before weights have moved.

    What fills the cache is rounded as the sampler is, and chooses its own experts: entries on routers do not reach it.

    Attributes
    ----------
    pushes : int
        How many weight pushes ago the cache was filled.
    """

    pushes: int

    place = "cache"

    @property
    def older_pushes(self) -> int:
        """Those that were not followed by a cleared cache."""
        return self.pushes

    def check(self) -> None:
        """A count."""
        super().check()
        self.require(is_count(self.pushes), "pushes", "a whole number of at least 1")

    def refuse(self, cell: Cell) -> None:
        """Before the first update there are no older weights to measure the strength on."""
        if cell.target_kl is not None:
            legal = "null with stale_kv in the list"
            way_out = "Its size depends on how far weights move in a push, which nothing tells before the run."
            raise OptionError("mismatch.target_kl", cell.target_kl, legal, way_out)
