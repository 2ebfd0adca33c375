"""The learner of this package: the explicit loop of `stalefront.loop`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.engine import Engine

if TYPE_CHECKING:
    from stalefront.build import Parts
    from stalefront.cell import Cell
    from stalefront.session import Session


@dataclass(frozen=True)
class Native(Engine):
    """Every delay, correction and loss."""

    def run(self, cell: Cell, parts: Parts, session: Session) -> str:
        """See `stalefront.loop.run_loop`."""
        from stalefront.loop import run_loop

        return run_loop(cell, parts, session)
