"""Exact lag: every learner step takes a fresh batch sampled by the weights of k updates ago."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stalefront.delay import Delay


@dataclass(frozen=True)
class Lag(Delay):
    """Constant version lag of `lag_updates` (fewer during the first `lag_updates` steps, which π₀ samples).

    `via=data` samples with the live weights and lets finished batches wait in a queue of k + 1; `via=weights` keeps
    the last k + 1 versions and samples with the oldest. Both give the same numbers; `data` needs memory for k + 1
    batches, `weights` for k + 1 copies of the model.
    """

    lag_updates: int
    via: Literal["weights", "data"]

    def check(self) -> None:
        """A lag is a count from 0."""
        self.require(self.lag_updates >= 0, "lag_updates", "a whole number of at least 0", "0 is on-policy.")

    @property
    def queue_batches(self) -> int:
        """k batches wait when the data is what is late."""
        return self.lag_updates if self.via == "data" else 0

    @property
    def kept_versions(self) -> int:
        """The last k versions when the weights are what is late."""
        return self.lag_updates if self.via == "weights" else 0

    @property
    def max_lag_updates(self) -> int:
        """The lag asked for."""
        return self.lag_updates

    def behaviour_version(self, version_now: int) -> int:
        """k updates ago, or π₀ while there are no k updates yet."""
        return max(0, version_now - self.lag_updates)
