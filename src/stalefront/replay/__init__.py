"""Seam `replay`: whose choice of experts the trainer's forward takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.choice import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import RolloutBatch


@dataclass(frozen=True)
class Replay(Choice):
    """Routes that the trainer replays, in a forward and in its backward; by default none.

    Attributes
    ----------
    probe_every : int
        Learner steps between two measurements of what replay changes: one more forward, by the router's own choices.
        0 is never.
    """

    probe_every: int

    def check(self) -> None:
        """A count of steps."""
        self.require(self.probe_every >= 0, "probe_every", "a whole number of at least 0", "0 never probes.")

    @property
    def acts(self) -> bool:
        """Some forward is told its routes."""
        return False

    def in_old(self, batch: RolloutBatch) -> Tensor | None:
        """Routes of the forward that scores the sampling weights, int16 (L, B, T, K); None for its own choice."""
        return None

    def in_theta(self, batch: RolloutBatch) -> Tensor | None:
        """Routes of the learner's forward and backward."""
        return None
