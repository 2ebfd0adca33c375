"""Act once consecutive updates have been aligned for a while, and the controls that this has to be compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from stalefront.choice import OptionError, is_count
from stalefront.controller import AS_IT_IS, Controller, Decision, Memory, Step
from stalefront.controller.optimizer_reset import refuse_without_moments

if TYPE_CHECKING:
    from stalefront.batch import Update
    from stalefront.cell import Cell

# Keys the random steps: another text would move every recorded one.
PURPOSE = "cosine trigger 0"


def smoothed(average: float, cosine: float, *, half_life: float) -> float:
    """a + (1 − 2^(−1/h)) (c − a): after h updates an old cosine counts half. The first cosine is the first average."""
    return cosine if math.isnan(average) else average + (1 - 2 ** (-1 / half_life)) * (cosine - average)


def random_steps(seed: int, *, count: int, horizon: int, cool_down: int) -> tuple[int, ...]:
    """`count` learner steps of 1 … `horizon`, more than `cool_down` apart, each such choice equally likely.

    Choices with gaps correspond one to one to choices of distinct numbers from a range that is shorter by the gaps.
    """
    from stalefront.keys import keyed

    room = horizon - (count - 1) * cool_down
    chosen = sorted(keyed(seed, PURPOSE).choice(room, size=count, replace=False).tolist())
    return tuple(int(step) + 1 + number * cool_down for number, step in enumerate(chosen))


@dataclass(frozen=True)
class CosineTrigger(Controller):
    """When the smoothed cosine of applied gradients has been beyond a threshold for a number of steps, do something.

    With `when` at `scheduled` or `random` the same thing is done at stated or at random steps: what is gained by
    looking at the cosine is the difference from these. The smoothed cosine is recorded in all three.

    Attributes
    ----------
    when
        `cosine`; `scheduled`, at the steps `at_steps`; `random`, at `max_triggers` steps keyed by the seed.
    threshold, side, window
        The trigger fires before a step when the average was `above` (or `below`) the threshold after each of the last
        `window` steps with a cosine.
    half_life : float
        Of the average, in applied updates. Where no angle exists the average stays and the step does not count.
    action, factor
        `multiply_lr`: the rate times `factor` from this step on; `divide_S`: the learner steps per batch divided by
        `factor` from the next batch on, down to whole passes over the batch; `reset_optimizer` (`factor` null).
        Repeated triggers multiply.
    at_steps
        Learner steps for `scheduled`, in order; null otherwise.
    max_triggers : int
        At most so many; `random` has exactly so many.
    cool_down : int
        Steps after a trigger at which none follows. The count towards `window` starts anew at every trigger.
    """

    when: Literal["cosine", "scheduled", "random"]
    threshold: float
    side: Literal["above", "below"]
    window: int
    half_life: float
    action: Literal["multiply_lr", "divide_S", "reset_optimizer"]
    factor: float | None
    at_steps: tuple[int, ...] | None
    max_triggers: int
    cool_down: int

    def check(self) -> None:
        """Ranges, and a factor and steps where they mean something."""
        self.require(not math.isnan(self.threshold), "threshold", "a number", "inf never fires.")
        self.require(is_count(self.window), "window", "a whole number of at least 1")
        self.require(math.isfinite(self.half_life) and self.half_life > 0, "half_life", "a finite number above 0")
        self.require(is_count(self.max_triggers), "max_triggers", "a whole number of at least 1")
        self.require(self.cool_down >= 0, "cool_down", "a whole number of at least 0")
        self._check_factor()
        self._check_steps()

    def _check_factor(self) -> None:
        factor = self.factor
        if self.action == "reset_optimizer":
            self.require(factor is None, "factor", "null for action=reset_optimizer", "Nothing is multiplied.")
        elif self.action == "divide_S":
            ok = factor is not None and factor >= 2 and float(factor).is_integer()
            self.require(ok, "factor", "a whole number of at least 2 for action=divide_S")
        else:
            ok = factor is not None and math.isfinite(factor) and factor > 0 and factor != 1
            self.require(ok, "factor", "a finite number above 0 other than 1 for action=multiply_lr", "0.5 halves it.")

    def _check_steps(self) -> None:
        steps = self.at_steps
        if self.when != "scheduled":
            self.require(steps is None, "at_steps", f"null for when={self.when}", "Only when=scheduled takes steps.")
            return
        apart = steps is not None and all(b - a > self.cool_down for a, b in pairwise(steps))
        ok = steps is not None and 0 < len(steps) <= self.max_triggers and steps[0] >= 1 and apart
        legal = f"1 to max_triggers={self.max_triggers} steps in order, more than cool_down={self.cool_down} apart"
        self.require(ok, "at_steps", legal)

    def refuse(self, cell: Cell) -> None:
        """Room for the triggers, batches to divide, moments to forget."""
        if self.action == "divide_S" and cell.delay.choice() != "reuse":
            way_out = "A batch serves one step there already: take multiply_lr or reset_optimizer, or delay=reuse."
            raise OptionError(self.key("action"), self.action, f"another one with delay={cell.delay.choice()}", way_out)
        if self.action == "reset_optimizer":
            refuse_without_moments(self, cell)
        last = max(self.at_steps or (1,))
        if last > cell.steps:
            raise OptionError(self.key("at_steps"), self.at_steps, f"steps up to steps={cell.steps}")
        room = 1 + (cell.steps - 1) // (self.cool_down + 1)
        if self.when == "random" and self.max_triggers > room:
            legal = f"at most {room} with steps={cell.steps} and cool_down={self.cool_down}"
            raise OptionError(self.key("max_triggers"), self.max_triggers, legal, "Random steps have that many places.")

    def start(self, cell: Cell) -> Memory:
        """No cosine yet, nothing triggered."""
        steps = self.at_steps or ()
        if self.when == "random":
            steps = random_steps(cell.seed, count=self.max_triggers, horizon=cell.steps, cool_down=self.cool_down)
        return Trigger(self, steps)


class Trigger(Memory):
    """The average, how long it has been beyond the threshold, and what was triggered so far."""

    def __init__(self, options: CosineTrigger, steps: tuple[int, ...]) -> None:
        self.options, self.steps = options, steps
        self.average = math.nan
        self.run = self.count = 0
        self.rest_until = 0
        self.fired = False

    def decide(self, now: Step) -> Decision:
        """Fire, and keep up what earlier triggers started."""
        options = self.options
        self.fired = now.step in self.steps if options.when != "cosine" else self._due(now.step)
        if self.fired:
            self.count, self.run, self.rest_until = self.count + 1, 0, now.step + options.cool_down
        if options.action == "multiply_lr" and options.factor is not None and self.count:
            return Decision(scale=options.factor**self.count)
        return Decision(reset_optimizer=True) if self.fired and options.action == "reset_optimizer" else AS_IT_IS

    def _due(self, step: int) -> bool:
        ready = self.count < self.options.max_triggers and step > self.rest_until
        return ready and self.run >= self.options.window

    def observe(self, update: Update) -> None:
        """Take in the cosine of the gradient just applied with the one before it."""
        cosine = math.nan if update.cos_grad is None else update.cos_grad
        if math.isnan(cosine):
            return
        self.average = smoothed(self.average, cosine, half_life=self.options.half_life)
        above, threshold = self.options.side == "above", self.options.threshold
        beyond = self.average > threshold if above else self.average < threshold
        self.run = self.run + 1 if beyond else 0

    @property
    def staleness_divisor(self) -> int:
        """factor^triggers for `divide_S`."""
        factor = self.options.factor
        return int(factor) ** self.count if self.options.action == "divide_S" and factor is not None else 1

    def columns(self) -> dict[str, Any]:
        """The average after this step, whether the trigger fired before it, and how often so far."""
        average = None if math.isnan(self.average) else self.average
        return {
            "cosine_trigger_mean": average,
            "cosine_trigger_fired": self.fired,
            "cosine_trigger_count": self.count,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything but the options."""
        return {"average": self.average, "run": self.run, "count": self.count, "rest_until": self.rest_until}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.average, self.run, self.count = state["average"], state["run"], state["count"]
        self.rest_until = state["rest_until"]
