"""The journal of a search: one Optuna study, one trial a cell. A search has no other state.

A trial has the parameters `arm` (its number in the study's list of arms, which only grows, so that a search can be
given more arms later), `log10_lr` and `seed`, and the attributes `cell_id`, `arm` (its label), `seed`,
`verdict`, `state`.

========== ====================================================================================
COMPLETE   the verdict decided: value 1 collapsed (a non-finite run is one that has), 0 not
PRUNED     the cell finished and the verdict could not decide
FAIL       the cell has no finished outcome; a later trial of the same cell takes its place
RUNNING    asked for and not told yet
========== ====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from stalefront.cell import MAX_SEED
from stalefront.search.bisection import learning_rate
from stalefront.search.rule import Question, Rule, Run, State

ARMS = "arms"
PARAMETERS = ("arm", "log10_lr", "seed")
STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "decided",
    TrialState.PRUNED: "undecided",
    TrialState.FAIL: "failed",
}


class FrontierSampler(BaseSampler):
    """Asks what a `Rule` asks, from the trials of the study alone."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters are chosen together."""
        return distributions(study, self.rule)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Parameters of the next cell."""
        question = self.rule.next_question(runs_by_arm(study))
        if question is None:
            raise RuntimeError("the search has ended: every arm has its runs")
        return _parameters(study, self.rule, question)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """There are no other parameters."""
        raise RuntimeError(f"{param_name} is no parameter of this search")


def open_study(journal: Path, rule: Rule, verdict: str) -> optuna.Study:
    """Study in `journal`, made if there is none; the caller holds the search's lock.

    Outcomes belong to the verdict that judged them, so each verdict has a study of its own.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal.parent.mkdir(parents=True, exist_ok=True)
    _mend(journal)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    sampler = FrontierSampler(rule)
    study = optuna.create_study(storage=storage, study_name=verdict, sampler=sampler, load_if_exists=True)
    known = list(study.user_attrs.get(ARMS, []))
    added = [arm_id for arm_id in rule.arm_ids if arm_id not in known]
    if added:
        study.set_user_attr(ARMS, known + added)
    return study


def _mend(journal: Path) -> None:
    """Undo what a writer leaves that was killed while it wrote: its lock, and a last line without an end."""
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if not journal.exists():
        return
    content = journal.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with journal.open("r+b") as file:
            file.truncate(whole)


def distributions(study: optuna.Study, rule: Rule) -> dict[str, BaseDistribution]:
    """Of the parameters, as wide as the search is now."""
    return {
        "arm": IntDistribution(0, len(study.user_attrs[ARMS]) - 1),
        "log10_lr": FloatDistribution(rule.x_K[0], rule.x_K[-1]),
        "seed": IntDistribution(0, MAX_SEED),
    }


def _parameters(study: optuna.Study, rule: Rule, question: Question) -> dict[str, Any]:
    x = rule.x_K[rule.lr_K.index(question.lr)]
    return {"arm": study.user_attrs[ARMS].index(question.arm_id), "log10_lr": x, "seed": question.seed}


def read_runs(study: optuna.Study) -> list[Run]:
    """Cells that were asked for, in order; of several trials of one cell the last.

    A trial whose controller was killed before all of its parameters were written never became a cell.
    """
    runs: dict[tuple[str, float, int], Run] = {}
    for trial in study.get_trials(deepcopy=False):
        if trial.state in STATES and all(name in trial.params for name in PARAMETERS):
            run = _run(trial, study.user_attrs[ARMS])
            runs[run.arm_id, run.lr, run.seed] = run
    return list(runs.values())


def _run(trial: FrozenTrial, arms: Sequence[str]) -> Run:
    x, seed = float(trial.params["log10_lr"]), int(trial.params["seed"])
    collapsed = bool(trial.value) if trial.state == TrialState.COMPLETE else None
    arm_id, cell_id = arms[trial.params["arm"]], str(trial.user_attrs.get("cell_id") or "")
    return Run(trial.number, arm_id, x, learning_rate(x), seed, cell_id, STATES[trial.state], collapsed)


def runs_by_arm(study: optuna.Study) -> dict[str, list[Run]]:
    """`read_runs`, by arm."""
    found: dict[str, list[Run]] = {}
    for run in read_runs(study):
        found.setdefault(run.arm_id, []).append(run)
    return found


def ask(study: optuna.Study, rule: Rule) -> Run | None:
    """A new trial, for the cell that comes next; None when every arm has ended."""
    if rule.next_question(runs_by_arm(study)) is None:
        return None
    trial = study.ask(distributions(study, rule))
    return next(run for run in read_runs(study) if run.number == trial.number)


def ask_again(study: optuna.Study, run: Run) -> Run:
    """A new trial for the cell of a failed one; a trial that was told cannot be told again."""
    old = study.get_trials(deepcopy=False)[run.number]
    attributes = {key: value for key, value in old.user_attrs.items() if key != "state"}
    again = create_trial(
        state=TrialState.RUNNING, params=old.params, distributions=old.distributions, user_attrs=attributes
    )
    study.add_trial(again)
    return next(found for found in reversed(read_runs(study)) if found.cell_id == run.cell_id)


def note(study: optuna.Study, run: Run, attributes: Mapping[str, Any]) -> None:
    """Write attributes of a trial that has not been told."""
    trial_id = study.get_trials(deepcopy=False)[run.number]._trial_id
    for key, value in attributes.items():
        study._storage.set_trial_user_attr(trial_id, key, value)


def abandon_torn(study: optuna.Study) -> None:
    """Tell trials that never became a cell that they failed."""
    for trial in study.get_trials(deepcopy=False):
        if trial.state == TrialState.RUNNING and not all(name in trial.params for name in PARAMETERS):
            study.tell(trial.number, state=TrialState.FAIL)


def tell(study: optuna.Study, run: Run, state: State, collapsed: bool | None) -> None:
    """How a cell ended."""
    note(study, run, {"state": state})
    if collapsed is not None:
        study.tell(run.number, float(collapsed))
    else:
        study.tell(run.number, state={"undecided": TrialState.PRUNED, "failed": TrialState.FAIL}[state])
