"""Seam `controller`: an ordered list of rules that change what is applied: the step, its size, or the optimizer.

A controller is a frozen choice; what it remembers while a cell runs lives in the object its `start` returns, which is
saved with every checkpoint. `Controllers` runs a cell's list.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from stalefront.choice import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs, Update
    from stalefront.cell import Cell


class Step(NamedTuple):
    """What a controller may look at before a learner step is applied; the same on every rank.

    Attributes
    ----------
    step : int
        The learner step about to be applied, from 1.
    inputs
        Loss inputs of the whole step, detached, all micro-batches and ranks joined.
    gradient : (N,) or None
        Flat float32 gradient before clipping, as the controllers before this one left it; None unless some controller
        of the cell needs it.
    previous_gradient : (N,) or None
        The gradient applied last, after clipping.
    first_of_batch : bool
        The first learner step on its rollout batch.
    new_weights : bool
        That batch is the first one from the weights that sampled it; false for the cell's first batch.
    """

    step: int
    inputs: LossInputs
    gradient: Tensor | None
    previous_gradient: Tensor | None
    first_of_batch: bool
    new_weights: bool


class Decision(NamedTuple):
    """What a controller asks for.

    Attributes
    ----------
    scale : float
        Factor on this step's learning rate.
    gradient : (N,) or None
        Gradient to apply in place of the accumulated one; None for that.
    skip : bool
        Apply nothing: the step is recorded, and the version of the weights stays.
    reset_optimizer : bool
        Forget the optimizer's state first, also where the step is skipped.
    cap : float or None
        Largest norm of the applied update.
    """

    scale: float = 1.0
    gradient: Tensor | None = None
    skip: bool = False
    reset_optimizer: bool = False
    cap: float | None = None

    @property
    def acts(self) -> bool:
        """True when the step is another one than it would have been; a cap shows only in the update."""
        return self.scale != 1 or self.gradient is not None or self.skip or self.reset_optimizer

    def then(self, other: Decision) -> Decision:
        """Both: scales multiply, the later gradient and the smaller cap hold, one skip or reset is enough."""
        caps = [decision.cap for decision in (self, other) if decision.cap is not None]
        return Decision(
            scale=self.scale * other.scale,
            gradient=self.gradient if other.gradient is None else other.gradient,
            skip=self.skip or other.skip,
            reset_optimizer=self.reset_optimizer or other.reset_optimizer,
            cap=min(caps) if caps else None,
        )


AS_IT_IS = Decision()


class Memory:
    """State of a controller while a cell runs; this one remembers nothing."""

    def decide(self, now: Step) -> Decision:
        """What to do about the step about to be applied."""
        raise NotImplementedError

    def observe(self, update: Update) -> None:
        """What the step did; a skipped one has `stepped` false."""

    @property
    def staleness_divisor(self) -> int:
        """Divide the learner steps that a rollout batch serves by this from the next batch on."""
        return 1

    def columns(self) -> dict[str, Any]:
        """Columns of the step record, prefixed by the controller's name; always the same keys."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything a restart needs to go on bit for bit."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""


@dataclass(frozen=True)
class Controller(Choice):
    """A rule on the optimizer's side of the loop.

    Attributes
    ----------
    needs_gradient : class attribute
        It looks at the flat gradient, which is then made before every step.
    """

    needs_gradient: ClassVar[bool] = False

    @classmethod
    def key(cls, field: str) -> str:
        """Override key of `field`."""
        return f"controller.{cls.choice()}.{field}"

    def refuse(self, cell: Cell) -> None:
        """Raise `OptionError` where the rule cannot work, or can never act, in `cell`."""

    @abstractmethod
    def start(self, cell: Cell) -> Memory:
        """State at the beginning of `cell`."""


class Controllers:
    """The controllers of a cell, in their order."""

    def __init__(self, controllers: Sequence[Controller], cell: Cell) -> None:
        self.needs_gradient = any(controller.needs_gradient for controller in controllers)
        self.memories = {controller.choice(): controller.start(cell) for controller in controllers}
        # Which of them have changed a step so far.
        self.acted: dict[str, bool] = dict.fromkeys(self.memories, False)
        self._capped: list[str] = []

    def decide(self, now: Step) -> Decision:
        """All decisions as one. Every controller is asked at every step, and sees the gradient of those before it."""
        together = AS_IT_IS
        self._capped = []
        for name, memory in self.memories.items():
            decision = memory.decide(now)
            if decision.gradient is not None:
                now = now._replace(gradient=decision.gradient)
            if decision.cap is not None:
                self._capped.append(name)
            self.acted[name] = self.acted[name] or decision.acts
            together = together.then(decision)
        return together

    def observe(self, update: Update) -> None:
        """Tell all of them what the step did."""
        for name, memory in self.memories.items():
            memory.observe(update)
            capped = name in self._capped and update.cap_factor != 1
            self.acted[name] = self.acted[name] or capped or memory.staleness_divisor != 1

    @property
    def staleness_divisor(self) -> int:
        """Product of their divisors."""
        product = 1
        for memory in self.memories.values():
            product *= memory.staleness_divisor
        return product

    def columns(self) -> dict[str, Any]:
        """Columns of all of them."""
        return {name: value for memory in self.memories.values() for name, value in memory.columns().items()}

    def state_dict(self) -> dict[str, Any]:
        """State of every one, and which have acted."""
        return {"memories": {name: m.state_dict() for name, m in self.memories.items()}, "acted": dict(self.acted)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name, memory in self.memories.items():
            memory.load_state_dict(state["memories"][name])
        self.acted = dict(state["acted"])
