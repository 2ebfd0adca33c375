"""Seam `delay`: which behaviour version the next rollout batch comes from, and how many learner steps it serves."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from stalefront.choice import Choice


@dataclass(frozen=True)
class Delay(Choice):
    """A delay schedule.

    Version = number of applied updates; a batch sampled by version v and trained on when the trainer is at version
    u has a lag of u − v updates.
    """

    @property
    def steps_per_batch(self) -> int:
        """Learner steps that one rollout batch serves."""
        return 1

    def steps_divided_by(self, divisor: int) -> int:
        """Learner steps a batch serves where a controller divides them: whole passes over its parts, at least one."""
        parts = self.parts_per_batch
        return max(parts, self.steps_per_batch // divisor // parts * parts)

    @property
    def parts_per_batch(self) -> int:
        """Parts a rollout batch is cut into; learner step i of a batch takes part i modulo this."""
        return 1

    @property
    def kept_versions(self) -> int:
        """Older versions of the weights that must be kept to sample from."""
        return 0

    @property
    def queue_batches(self) -> int:
        """Finished batches that wait ahead of the one being taken up."""
        return 0

    @property
    @abstractmethod
    def max_lag_updates(self) -> int:
        """Largest lag any token can have when it is trained on."""

    @abstractmethod
    def behaviour_version(self, version_now: int) -> int:
        """Version that samples the batch which the trainer takes up at `version_now`."""
