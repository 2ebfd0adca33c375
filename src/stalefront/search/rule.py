"""Which cell a search asks for next, from what its cells have said so far: nothing else is remembered."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stalefront.search.bisection import (
    SLACK,
    Answer,
    FloatArray,
    Point,
    believed_quantile,
    choose,
    deviation,
    posterior,
)

State = Literal["running", "decided", "undecided", "failed"]


@dataclass(frozen=True)
class Run:
    """One cell that a search asked for.

    Attributes
    ----------
    number : int
        Of its trial.
    arm_id : str
        Arm it belongs to.
    x : float
        log10 of its learning rate.
    state : str
        `decided` if the verdict said whether it collapsed, `undecided` if it could not, `failed` if the cell has no
        finished outcome, `running` while nobody has looked.
    """

    number: int
    arm_id: str
    x: float
    lr: float
    seed: int
    cell_id: str
    state: State
    collapsed: bool | None


@dataclass(frozen=True)
class Question:
    """A cell to run."""

    arm_id: str
    lr: float
    seed: int


@dataclass(frozen=True)
class Rule:
    """Bisects every arm by itself; the arms with fewest runs come first, then those known worst.

    Attributes
    ----------
    x_K, lr_K : tuple of float
        Candidates, log10 and as they are.
    right : float
        Assumed probability that an answer is right.
    """

    arm_ids: tuple[str, ...]
    x_K: tuple[float, ...]
    lr_K: tuple[float, ...]
    seeds: tuple[int, ...]
    right: float
    runs_per_arm: int
    tolerance: float | None

    def posterior(self, runs: Sequence[Run]) -> FloatArray:
        """Posterior of an arm; runs that are not decided say nothing."""
        answers = [Answer(run.x, run.collapsed) for run in runs if run.collapsed is not None]
        return posterior(self.x_K, answers, self.right)

    def ended_by(self, runs: Sequence[Run]) -> str:
        """Why an arm asks for nothing more: `budget`, `tolerance` or `no free cell`; empty while it does.

        Every cell counts against the budget, whether it was decided or not.
        """
        return self._ended_by(self.posterior(runs), runs)

    def _ended_by(self, mass_C: FloatArray, runs: Sequence[Run]) -> str:
        if self.tolerance is not None and deviation(self.x_K, mass_C) < self.tolerance:
            return "tolerance"
        if len(runs) >= self.runs_per_arm:
            return "budget"
        return "" if self._point(mass_C, runs) is not None else "no free cell"

    def next_question(self, runs: Mapping[str, Sequence[Run]]) -> Question | None:
        """Cell to ask for, given the runs of each arm; None when every arm has ended."""
        masses = {arm_id: self.posterior(runs.get(arm_id, ())) for arm_id in self.arm_ids}
        open_arms = [arm_id for arm_id in self.arm_ids if not self._ended_by(masses[arm_id], runs.get(arm_id, ()))]
        if not open_arms:
            return None
        spread = {arm_id: deviation(self.x_K, masses[arm_id]) for arm_id in open_arms}
        arm_id = min(open_arms, key=lambda one: (len(runs.get(one, ())), -spread[one]))
        point = self._point(masses[arm_id], runs.get(arm_id, ()))
        assert point is not None
        return Question(arm_id, self.lr_K[point.candidate], point.seed)

    def _point(self, mass_C: FloatArray, runs: Sequence[Run]) -> Point | None:
        pending = sum(run.state == "running" for run in runs)
        taken = [Point(index, run.seed) for run in runs if (index := self._index(run.lr)) is not None]
        return choose(mass_C, believed_quantile(pending), self.seeds, taken)

    def _index(self, lr: float) -> int | None:
        """Candidate with this learning rate; a run of an earlier search may lie between candidates."""
        index = bisect.bisect_left(self.lr_K, lr * (1 - SLACK))
        return index if index < len(self.lr_K) and self.lr_K[index] <= lr * (1 + SLACK) else None
