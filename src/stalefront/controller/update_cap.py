"""A bound on how far one step moves the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stalefront.controller import Controller, Decision, Memory, Step

if TYPE_CHECKING:
    from stalefront.batch import Update
    from stalefront.cell import Cell


@dataclass(frozen=True)
class UpdateCap(Controller):
    """‖Δθ‖ ≤ cap: the step is made, measured, and shortened to `cap` where it is longer.

    For every optimizer here, weight decay included, Δθ is proportional to the rate once the moments are known; so a
    shortened step is the one of a smaller rate, which `lr_scale` and `lr_applied` then say. The moments take in the
    gradient as they would without the cap. A step that is not finite is left as it is.

    Attributes
    ----------
    cap : float
        Largest norm of the update, over all parameters.
    """

    cap: float

    def check(self) -> None:
        """A length."""
        self.require(self.cap > 0, "cap", "a number above 0, or inf for none")

    def start(self, cell: Cell) -> Memory:
        """Nothing to remember."""
        return Shortened(self.cap)


class Shortened(Memory):
    """By how much the last step was shortened."""

    def __init__(self, cap: float) -> None:
        self.cap, self.factor = cap, 1.0

    def decide(self, now: Step) -> Decision:
        """The bound."""
        return Decision(cap=self.cap)

    def observe(self, update: Update) -> None:
        """The factor that held it."""
        self.factor = update.cap_factor

    def columns(self) -> dict[str, Any]:
        """Factor on Δθ, 1 where the step was short enough."""
        return {"update_cap_factor": self.factor}
