"""Sort five digits: what is held out stays out, the answer is right, and rows are keyed."""

from __future__ import annotations

import numpy as np
import pytest

from stalefront.task.sort5 import is_held_out


@pytest.fixture(scope="module")
def task(make_cell):
    return make_cell().task


def number(row):
    return int(row["prompt"][1:-1])


def test_held_out_rows_are_never_trained_on(task):
    trained = {number(row) for seed in (0, 1) for batch in range(1, 1500) for row in task.train_rows(seed, batch)}
    validated = {number(row) for seed in range(8) for row in task.validation_rows(seed, 512)}
    assert len(trained) > 15_000
    assert len(validated) > 3_000
    assert not trained & validated


def test_one_input_in_ten_is_held_out():
    share = is_held_out(np.arange(100_000)).mean()
    assert share == pytest.approx(0.1, abs=0.005)


@pytest.mark.parametrize("rows", ["train", "validation"])
def test_the_answer_is_the_sorted_digits(rows, task):
    made = task.train_rows(0, 1) if rows == "train" else task.validation_rows(0, 8)
    for row in made:
        assert row["prompt"][0] == "_"
        assert row["prompt"][-1] == ">"
        assert row["answer"] == "".join(sorted(row["prompt"][1:-1]))
        assert len(row["answer"]) == 5


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("12345", 1), ("1234", 0), ("123455", 0), ("12354", 0), ("", 0), (" 12345", 0), ("12345>", 0), ("52413", 0)],
)
def test_reward(completion, reward, task):
    row = {"prompt": "_52413>", "answer": "12345"}
    assert task.score([row], [completion], [[]]) == [reward]


def test_more_rows_of_a_batch_keep_the_first_ones(make_cell):
    few, many = (make_cell(**{"task.num_prompts": n}).task for n in (4, 16))
    assert many.train_rows(0, 5)[:4] == few.train_rows(0, 5)
    assert few.validation_rows(0, 128)[:16] == few.validation_rows(0, 16)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_prompts", 0), ("num_generations", 1), ("max_completion_length", 0), ("temperature", 0), ("temperature", -1)],
)
def test_refused(field, value, make_cell):
    with pytest.raises(ValueError, match=f"task.{field}"):
        make_cell(**{f"task.{field}": value})
