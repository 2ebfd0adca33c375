"""R2: the trainer replays the routes of its own forward under the sampling weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.replay import Replay

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import RolloutBatch


@dataclass(frozen=True)
class R2(Replay):
    """θ takes the experts that the recomputed old policy took: θ/old is free of flips, old/μ is not."""

    @property
    def acts(self) -> bool:
        """It does."""
        return True

    def in_theta(self, batch: RolloutBatch) -> Tensor | None:
        """What the trainer chose under the sampling weights."""
        return batch.own_routes_LBTK
