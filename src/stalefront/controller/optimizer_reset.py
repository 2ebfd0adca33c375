"""A fresh optimizer whenever the sampler takes up new weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stalefront.choice import OptionError, is_count
from stalefront.controller import AS_IT_IS, Controller, Decision, Memory, Step

if TYPE_CHECKING:
    from stalefront.cell import Cell


def refuse_without_moments(controller: Controller, cell: Cell) -> None:
    """Raise `OptionError` where the optimizer remembers nothing that could be forgotten."""
    if cell.optimizer.kind != "adamw":
        way_out = f"{cell.optimizer.kind} has no moments, so {controller.choice()} would never act."
        raise OptionError("optimizer.kind", cell.optimizer.kind, "adamw", way_out)


@dataclass(frozen=True)
class OptimizerReset(Controller):
    """Forget the optimizer's moments before the first step on a batch from new weights, as GLM-5 does at every push.

    A batch counts as from new weights where a later version sampled it than the batch before; the cell's first batch
    does not count. Under `delay=lag` every batch does, once the lag has built up. Adam's bias correction starts over
    too, so the first step after a reset has about the size lr for every parameter; the warm-up of the rate does not.

    Attributes
    ----------
    every : int
        Reset at every push (1), or at every k-th.
    """

    every: int

    def check(self) -> None:
        """A count."""
        self.require(is_count(self.every), "every", "a whole number of at least 1", "1 resets at every push.")

    def refuse(self, cell: Cell) -> None:
        """There must be something to forget."""
        refuse_without_moments(self, cell)

    def start(self, cell: Cell) -> Memory:
        """No push yet."""
        return Pushes(self.every)


class Pushes(Memory):
    """How often the sampler took up new weights."""

    def __init__(self, every: int) -> None:
        self.every, self.count, self.now = every, 0, False

    def decide(self, now: Step) -> Decision:
        """Reset at every k-th push."""
        self.count += now.new_weights
        self.now = now.new_weights and self.count % self.every == 0
        return Decision(reset_optimizer=True) if self.now else AS_IT_IS

    def columns(self) -> dict[str, Any]:
        """Whether the optimizer was reset before this step."""
        return {"optimizer_reset_now": self.now}

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.count = state["count"]
