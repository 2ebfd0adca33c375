"""Reading the files: torn lines, non-finite tokens, absent against zero, files that are not there."""

import json
import math

import numpy as np
import pytest

from stalefront.analysis.records import read_plan, read_steps


def write(path, *lines):
    path.write_text("".join(lines))
    return path


def row(step, **values):
    return json.dumps({"step": step, **values}) + "\n"


def test_non_finite_tokens_stay_and_null_stays_absent(tmp_path):
    path = write(
        tmp_path / "steps.jsonl",
        row(0, reward_val=0.25, reward_val_n=128, reward_val_passes=32, dist_from_start=0.0),
        row(1, reward_val=None, reward_val_n=None, reward_val_passes=None, dist_from_start=math.inf),
        row(2, reward_val=math.nan, reward_val_n=128, reward_val_passes=None, dist_from_start=math.nan),
    )
    steps = read_steps(path, "reward_val")
    assert steps.measured.tolist() == [True, False, True]
    assert math.isnan(steps.reward[2])
    assert steps.passes.tolist() == [32, 0, 0]
    assert math.isinf(steps.dist[1])


def test_a_torn_last_line_is_left_out_and_counted(tmp_path):
    path = write(tmp_path / "steps.jsonl", row(0), row(1), '{"step": 2, "rewa')
    steps = read_steps(path, "reward_val")
    assert steps.step.tolist() == [0, 1]
    assert steps.torn == 1
    assert steps.notes == ("torn last line left out",)


@pytest.mark.parametrize("bad", ['{"step": 1, "x', "[1, 2]", '{"no": "step"}', "\udcff"])
def test_a_torn_line_elsewhere_is_an_error_that_names_it(tmp_path, bad):
    path = tmp_path / "steps.jsonl"
    path.write_bytes((row(0) + bad + "\n" + row(2)).encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="line 2 of 3"):
        read_steps(path, "reward_val")


def test_repeated_steps_keep_the_last_and_are_counted(tmp_path):
    path = write(tmp_path / "steps.jsonl", row(0), row(2, lr_applied=1.0), row(1), row(2, lr_applied=3.0))
    steps = read_steps(path, "reward_val")
    assert steps.step.tolist() == [0, 1, 2]
    assert steps.lr_applied[2] == 3.0
    assert steps.repeated == 1


@pytest.mark.parametrize("content", [None, "", "\n\n"])
def test_no_rows(tmp_path, content):
    path = tmp_path / "steps.jsonl"
    if content is not None:
        path.write_text(content)
    steps = read_steps(path, "reward_val")
    assert len(steps.step) == 0
    assert steps.at_refresh.dtype == np.bool_


def test_a_plan_that_is_not_there_says_what_a_sweep_directory_is(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"plan\.json and cells"):
        read_plan(tmp_path)


def test_a_plan_of_another_format_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="format=2"):
        read_plan(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        read_plan(tmp_path)
