"""Which cell comes next: order of arms, ends of arms, cells that say nothing."""

import dataclasses
import math

import pytest

from stalefront.search.rule import Question, Rule, Run

LR = (1e-4, 1e-3, 1e-2)
RULE = Rule(("a", "b"), tuple(map(math.log10, LR)), LR, (0, 1), 0.85, 4, None)


def run(arm_id, lr, seed=0, state="decided", collapsed=None):
    return Run(0, arm_id, math.log10(lr), lr, seed, "", state, collapsed)


def test_arms_with_fewest_runs_come_first_then_those_known_worst():
    assert RULE.next_question({}) == Question("a", 1e-3, 0)
    assert RULE.next_question({"a": [run("a", 1e-3, collapsed=True)]}) == Question("b", 1e-3, 0)
    known = [run("a", 1e-3, 0, collapsed=True), run("a", 1e-3, 1, collapsed=True)]
    torn = [run("b", 1e-3, 0, collapsed=True), run("b", 1e-3, 1, collapsed=False)]
    assert RULE.next_question({"a": known, "b": torn}).arm_id == "b"


def test_answers_move_the_question():
    only = dataclasses.replace(RULE, arm_ids=("a",))
    assert only.next_question({"a": [run("a", 1e-3, collapsed=True)]}) == Question("a", 1e-4, 1)
    assert only.next_question({"a": [run("a", 1e-3, collapsed=False)]}) == Question("a", 1e-2, 1)


@pytest.mark.parametrize("state", ["failed", "undecided"])
def test_cells_without_an_answer_cost_a_run_and_say_nothing(state):
    runs = [run("a", 1e-3, 0, state), run("a", 1e-3, 1, state)]
    assert RULE.posterior(runs) == pytest.approx([0.25] * 4)
    only = dataclasses.replace(RULE, arm_ids=("a",))
    assert only.next_question({"a": runs}) == Question("a", 1e-4, 0)
    assert dataclasses.replace(only, runs_per_arm=2).next_question({"a": runs}) is None


def test_why_an_arm_ends():
    sure = [run("a", 1e-3, seed, collapsed=True) for seed in (0, 1)]
    assert RULE.ended_by(sure) == ""
    assert dataclasses.replace(RULE, runs_per_arm=2).ended_by(sure) == "budget"
    assert dataclasses.replace(RULE, tolerance=0.9).ended_by(sure) == "tolerance"
    every = [run("a", lr, seed, collapsed=True) for lr in LR for seed in (0, 1)]
    assert dataclasses.replace(RULE, runs_per_arm=9).ended_by(every) == "no free cell"


def test_a_run_between_the_candidates_counts_as_an_answer_and_takes_no_cell():
    between = [run("a", 3e-4, 0, collapsed=False)]
    assert RULE.posterior(between)[2] > RULE.posterior(between)[1] > RULE.posterior(between)[0]
    assert RULE.ended_by(between) == ""
