"""Laws that every task of `conf/task/` keeps."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from stalefront.cell import make_choice

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "task").glob("*.yaml"))


@pytest.fixture(scope="module", params=NAMES)
def task(request, conf_choice, tmp_path_factory):
    options = conf_choice("task", request.param)
    if options.get("path") == "???":
        path = tmp_path_factory.mktemp("data") / "rows.jsonl"
        rows = [{"prompt": f"What is {n} + 1?", "answer": n + 1} for n in range(40)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options["path"] = str(path)
    return make_choice("task", options)


def test_the_same_key_gives_the_same_rows(task):
    assert task.train_rows(3, 2) == task.train_rows(3, 2)
    assert task.validation_rows(3, 10) == task.validation_rows(3, 10)


def test_seed_and_batch_change_the_rows(task):
    assert task.train_rows(0, 1) != task.train_rows(1, 1)
    assert task.train_rows(0, 1) != task.train_rows(0, 2)


def test_it_gives_as_many_rows_as_asked_for(task):
    assert len(task.train_rows(0, 1)) == task.num_prompts
    assert [len(task.validation_rows(0, count)) for count in (1, 7, 300)] == [1, 7, 300]


def test_validation_rows_are_never_training_rows(task):
    trained = {str(row["prompt"]) for batch in range(1, 201) for row in task.train_rows(0, batch)}
    assert not trained & {str(row["prompt"]) for seed in (0, 1) for row in task.validation_rows(seed, 200)}


def test_gold_answers_pass_and_junk_does_not(task):
    rows = task.train_rows(0, 1)
    ids = [[]] * len(rows)
    assert task.score(rows, [str(row["answer"]) for row in rows], ids) == [1.0] * len(rows)
    for junk in ("", "?", "no idea\nat all", "\n", "−1e999", "\x00"):
        assert task.score(rows, [junk] * len(rows), ids) == [0.0] * len(rows)


def test_scoring_is_pure(task):
    rows = task.train_rows(0, 1)
    before = copy.deepcopy(rows)
    texts = [str(row["answer"]) for row in rows]
    assert task.score(rows, texts, [[]] * len(rows)) == task.score(rows, texts, [[]] * len(rows))
    assert rows == before
