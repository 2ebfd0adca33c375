"""The parity arm: a sampler that computes with the trainer's own forward, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.choice import OptionError
from stalefront.mismatch import Path

if TYPE_CHECKING:
    from stalefront.cell import Cell


@dataclass(frozen=True)
class Parity(Path):
    """No difference at all: every token is drawn from the trainer's teacher-forced forward, in the learner's shapes.

    The positive control: log old/μ is exactly 0, where even without injectors a cached decode differs in the last
    bits. It costs one full forward a token. Of a mixture of experts it is 0 within rounding: the shapes of an expert's
    products depend on how many of the other tokens it computes, and those are not drawn yet.
    """

    def check(self) -> None:
        """There is no half of a control."""
        super().check()
        self.require(self.strength == 1, "strength", "1", "Leave parity out of the list for a sampler with a cache.")

    def refuse(self, cell: Cell) -> None:
        """Alone, and in one process: ranks cut the learner's slices."""
        names = [entry.choice() for entry in cell.mismatch]
        if len(names) > 1:
            raise OptionError("mismatch", names, "[parity] alone", "It is the absence of all the others.")
        if cell.target_kl is not None:
            raise OptionError("mismatch.target_kl", cell.target_kl, "null with mismatch=[parity]")
        if cell.model.ranks > 1:
            raise OptionError("model.ranks", cell.model.ranks, "1 with mismatch=[parity]")
        if cell.model.fp32_head == "trainer":
            raise OptionError("model.fp32_head", "trainer", "none or both with mismatch=[parity]")
