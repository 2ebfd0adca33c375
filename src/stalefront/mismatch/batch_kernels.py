"""Kernels whose last bits depend on how many rows are computed side by side."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.choice import is_count
from stalefront.mismatch import Path


@dataclass(frozen=True)
class BatchKernels(Path):
    """Rows are decoded `prompts` prompts at a time, as a continuously batching engine would, and not all at once.

    The numbers are the same but for the order of sums. In float32 that is about 1e-7 nats a token; a large strength
    magnifies it.

    Attributes
    ----------
    prompts : int
        Prompts (with all their samples) side by side.
    """

    prompts: int

    def check(self) -> None:
        """A count."""
        super().check()
        self.require(is_count(self.prompts), "prompts", "a whole number of at least 1")
