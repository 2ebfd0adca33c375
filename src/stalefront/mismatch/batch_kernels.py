"""Kernels whose last bits depend on how many rows are computed side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.choice import is_count
from stalefront.mismatch import Path

if TYPE_CHECKING:
    from stalefront.cell import Cell


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

    def refuse(self, cell: Cell) -> None:
        """All prompts side by side are what there is without the entry."""
        super().refuse(cell)
        legal = f"below task.num_prompts={cell.task.num_prompts}"
        self.require(self.prompts < cell.task.num_prompts, "prompts", legal, "Otherwise every shape is as before.")
