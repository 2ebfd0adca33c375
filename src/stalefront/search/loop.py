"""The search itself: ask, run, judge, tell, until every arm has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import optuna

from stalefront.files import write_json
from stalefront.paths import SweepPaths
from stalefront.search import study as journal
from stalefront.search.arms import Space
from stalefront.search.findings import Finding, as_json, findings
from stalefront.search.options import SearchOptions
from stalefront.search.rule import Rule, Run, State

Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Launched:
    """How a batch ended.

    Attributes
    ----------
    states : mapping
        Cell id → state.
    stopped : bool
        The launch was stopped, or left cells to go on without it: nothing more is to be asked now.
    """

    states: Mapping[str, str]
    stopped: bool


@dataclass(frozen=True)
class Bench:
    """What a search acts through.

    Attributes
    ----------
    cell_id : callable
        Overrides → cell id.
    launch : callable
        Runs the cells of some lists of overrides, of which finished ones are not run again.
    judge : callable
        Cell id of a finished cell → collapsed or not, None where the verdict cannot say.
    """

    cell_id: Callable[[Overrides], str]
    launch: Callable[[Sequence[Overrides]], Launched]
    judge: Callable[[str], bool | None]
    say: Callable[[str], None] = print


class Search:
    """One search in one sweep directory; the caller holds `SweepPaths.search_lock`."""

    def __init__(self, paths: SweepPaths, space: Space, options: SearchOptions, bench: Bench) -> None:
        self.paths, self.space, self.options, self.bench = paths, space, options, bench
        self.arms = {arm.arm_id: arm for arm in space.arms}
        settings = (options.collapsed_prob, options.runs_per_arm, options.tolerance)
        self.rule = Rule(tuple(self.arms), space.x_K, space.lr_K, space.seeds, *settings)
        self.study: optuna.Study = journal.open_study(paths.journal, self.rule, options.verdict)

    def run(self) -> bool:
        """Go on until every arm has ended; False when it was stopped before. The same call continues."""
        pending = self._left_over()
        self._introduce(pending)
        while batch := self._batch(pending):
            pending = []
            launched = self.bench.launch([self._overrides(run) for run in self._shown(batch)])
            self._tell(batch, launched)
            write_json(self.paths.search, as_json(self.findings(), self.space, self.options))
            pointless = self._pointless(batch)
            if pointless:
                self.bench.say(f"The search stops: {pointless} The same command goes on from here.")
            if pointless or launched.stopped:
                return False
        write_json(self.paths.search, as_json(self.findings(), self.space, self.options))
        return True

    def findings(self) -> list[Finding]:
        """What is known about the arms of this command."""
        return findings(self.space, self.rule, journal.runs_by_arm(self.study))

    def finished(self) -> list[Overrides]:
        """Cells of this command's arms that have ended well."""
        return [self._overrides(run) for run in self._runs() if run.state in ("decided", "undecided")]

    def _runs(self) -> list[Run]:
        return [run for run in journal.read_runs(self.study) if run.arm_id in self.arms]

    def _left_over(self) -> list[Run]:
        """Cells that an earlier controller did not come to tell of, and failed ones, which run again."""
        journal.abandon_torn(self.study)
        found = [journal.ask_again(self.study, run) if run.state == "failed" else run for run in self._runs()]
        return [self._noted(run) for run in found if run.state == "running"]

    def _introduce(self, pending: Sequence[Run]) -> None:
        told, arms = len(self._runs()) - len(pending), len(self.arms)
        text = f"Search over {len(self.space.lr_K)} learning rates, {self.space.lr_K[0]:g} to {self.space.lr_K[-1]:g}"
        text += f", in {arms} {'arm' if arms == 1 else 'arms'}"
        text += f": {told} cells told before, {len(pending)} to be looked at again" if told or pending else ""
        self.bench.say(f"{text}.")

    def _batch(self, pending: Sequence[Run]) -> list[Run]:
        """Cells to run now: those left over, and new ones up to the size of a batch."""
        batch = list(pending)
        size = self.options.batch or sum(1 for one in self.findings() if not one.ended_by)
        while len(batch) < size:
            run = journal.ask(self.study, self.rule)
            if run is None:
                break
            batch.append(self._noted(run))
        return batch

    def _noted(self, run: Run) -> Run:
        """The run, with what identifies its cell written to its trial."""
        cell_id = self.bench.cell_id(self._overrides(run))
        about = {"arm": self.arms[run.arm_id].label, "seed": run.seed, "verdict": self.options.verdict}
        if run.cell_id != cell_id:
            journal.note(self.study, run, {"cell_id": cell_id, **about})
        return next(noted for noted in self._runs() if noted.number == run.number)

    def _overrides(self, run: Run) -> Overrides:
        return self.arms[run.arm_id].cell_overrides(run.lr, run.seed)

    def _shown(self, batch: Sequence[Run]) -> list[Run]:
        """The batch and the finished cells, which are not run again.

        A launch compares the settings of its cells with those planned before. It then sees all arms, and its progress
        is that of the search.
        """
        told = [run for run in self._runs() if run.state in ("decided", "undecided")]
        return [*told, *batch]

    def _pointless(self, batch: Sequence[Run]) -> str:
        """Why more cells would only cost: what keeps all of a batch from an answer keeps the next ones too."""
        numbers, runs = {run.number for run in batch}, self._runs()
        if all(run.state == "failed" for run in runs if run.number in numbers):
            return "no cell of this batch finished."
        if all(run.state == "undecided" for run in runs):
            return (
                f"{self.options.verdict} could decide none of the {len(runs)} cells. More learner steps, a higher "
                "validation.num_samples or a lower validation.every give it more samples; the report names the reason."
            )
        return ""

    def _tell(self, batch: Sequence[Run], launched: Launched) -> None:
        """Tell of every cell that ended. Of a stopped launch, the others stay asked for."""
        for run in batch:
            state = launched.states[run.cell_id]
            if state in ("completed", "non-finite"):
                collapsed = self.bench.judge(run.cell_id)
                outcome: State = "undecided" if collapsed is None else "decided"
                journal.tell(self.study, run, outcome, collapsed)
            elif not launched.stopped or state == "failed":
                journal.tell(self.study, run, "failed", None)
