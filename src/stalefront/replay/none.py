"""Every forward chooses its own experts."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.replay import Replay


@dataclass(frozen=True)
class NoReplay(Replay):
    """Sampler and trainer may disagree, and so may old and θ."""

    def check(self) -> None:
        """There is nothing to probe."""
        self.require(self.probe_every == 0, "probe_every", "0 with replay=none", "Nothing is replayed.")
