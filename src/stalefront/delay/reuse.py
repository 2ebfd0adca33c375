"""Rollout reuse: one batch serves S learner steps, so lags run 0 … S − 1 in every cycle (arXiv 2607.01083, §2)."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.choice import is_count
from stalefront.delay import Delay


@dataclass(frozen=True)
class Reuse(Delay):
    """Sample once, take `S` learner steps, sample again.

    With `minibatches` = 1 every step sees the whole batch. With N > 1 step i sees part i mod N of it, whole groups
    at a time, so S / N is the number of passes over the data.
    """

    S: int
    minibatches: int

    def check(self) -> None:
        """S is a count and the parts of a batch are all used equally often."""
        self.require(is_count(self.S), "S", "a whole number of at least 1", "S=1 is on-policy.")
        ok = is_count(self.minibatches) and self.S % self.minibatches == 0
        self.require(ok, "minibatches", f"a divisor of delay.S={self.S}", "Otherwise part of a batch is used less.")

    @property
    def steps_per_batch(self) -> int:
        """S."""
        return self.S

    @property
    def parts_per_batch(self) -> int:
        """N."""
        return self.minibatches

    @property
    def max_lag_updates(self) -> int:
        """The last step on a batch is S − 1 updates away from the weights that sampled it."""
        return self.S - 1

    def behaviour_version(self, version_now: int) -> int:
        """A batch is sampled by the weights that its first learner step starts from."""
        return version_now
