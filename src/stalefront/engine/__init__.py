"""Seam `engine`: who runs the learner. The records are the same whichever it is."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.choice import Choice

if TYPE_CHECKING:
    from stalefront.build import Parts
    from stalefront.cell import Cell
    from stalefront.session import Session


@dataclass(frozen=True)
class Engine(Choice):
    """Runs a cell from its parts, or continues it from a checkpoint."""

    def refuse(self, cell: Cell) -> None:
        """Raise `OptionError` for a cell this engine cannot run."""

    @abstractmethod
    def run(self, cell: Cell, parts: Parts, session: Session) -> str:
        """Train until the horizon, a stop request or non-finite parameters; returns the outcome state."""
