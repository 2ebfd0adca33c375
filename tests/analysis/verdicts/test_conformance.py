"""Laws every collapse definition obeys, found by walking the folder."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest

import stalefront.analysis.verdicts as verdicts

DEFINITIONS = {d.name: d for d in verdicts.default_definitions()}
HELPERS = {"__init__", "base", "zero"}

RUNS = {
    "alive": ([40] * 12, "horizon"),
    "dead": ([40] * 4 + [0] * 8, "horizon"),
    "recovering": ([40] * 3 + [0] * 4 + [40] * 5, "horizon"),
    "running": ([40] * 4 + [0] * 8, "running"),
    "non-finite": ([40] * 12, "non-finite"),
    "empty": ([], "missing"),
}


def test_every_file_is_a_definition_with_its_stem_as_name():
    stems = {p.stem for p in Path(verdicts.__file__).parent.glob("*.py")} - HELPERS
    assert stems == set(DEFINITIONS)
    assert verdicts.DEFAULT in DEFINITIONS


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("run", RUNS)
def test_verdicts_are_well_formed(curve, name, run):
    passes, end = RUNS[run]
    verdict = DEFINITIONS[name](curve(passes, end=end))
    assert verdict.name == name
    assert verdict.event in (True, False, None)
    if verdict.event:
        assert verdict.step_lo < verdict.step_hi
    else:
        assert verdict.step_lo is None
        assert verdict.step_hi is None
    assert ("reason" in verdict.evidence) == (verdict.event is None)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_an_empty_record_is_undecidable(curve, name):
    assert DEFINITIONS[name](curve([], end="failed")).event is None


@pytest.mark.parametrize("name", DEFINITIONS)
def test_non_finite_is_a_collapse(curve, name):
    assert DEFINITIONS[name](curve([40] * 12, end="non-finite")).event is True


@pytest.mark.parametrize("name", DEFINITIONS)
def test_more_samples_at_the_same_rates_keep_the_verdict(curve, name):
    run = curve([40] * 4 + [0] * 8)
    bigger = replace(run, samples=run.samples * 4, passes=run.passes * 4)
    assert DEFINITIONS[name](bigger).event == DEFINITIONS[name](run).event


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definitions_are_frozen_and_say_their_thresholds(name):
    definition = DEFINITIONS[name]
    with pytest.raises(FrozenInstanceError):
        definition.min_samples = 1
    assert "300" in definition.sentence


def test_a_curve_refuses_what_cannot_be():
    ints = np.array([0, 4], dtype=np.int64)
    good = {"samples": ints + 10, "passes": ints, "reward": ints / 10, "horizon": 4, "end_step": 4, "end": "horizon"}
    with pytest.raises(ValueError, match="increase strictly"):
        verdicts.Curve(steps=ints[::-1], **good)
    with pytest.raises(ValueError, match="passes must lie"):
        verdicts.Curve(steps=ints, **{**good, "passes": ints + 99})
    with pytest.raises(ValueError, match="share one shape"):
        verdicts.Curve(steps=ints[:1], **good)
