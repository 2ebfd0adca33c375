"""R3: the trainer replays the routes that were recorded at rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.replay import Replay

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import RolloutBatch


@dataclass(frozen=True)
class R3(Replay):
    """Old and θ take the sampler's experts: flips are gone from old/μ as well (Ma et al. 2025, arXiv 2510.11370).

    Both forwards replay, or the two ratios would not share a policy.
    """

    @property
    def acts(self) -> bool:
        """It does."""
        return True

    def in_old(self, batch: RolloutBatch) -> Tensor | None:
        """What was recorded."""
        return batch.routes_LBTK

    def in_theta(self, batch: RolloutBatch) -> Tensor | None:
        """What was recorded."""
        return batch.routes_LBTK
