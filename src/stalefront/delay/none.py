"""On-policy: every learner step trains on a batch sampled by the current weights."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.delay import Delay


@dataclass(frozen=True)
class NoDelay(Delay):
    """One fresh batch a learner step, lag 0 everywhere."""

    @property
    def max_lag_updates(self) -> int:
        """Nothing is ever stale."""
        return 0

    def behaviour_version(self, version_now: int) -> int:
        """The current version."""
        return version_now
