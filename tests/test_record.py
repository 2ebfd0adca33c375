"""The step file: non-finite numbers survive, a torn line is left out, and rewinding loses nothing."""

import json
import math
from pathlib import Path

import pytest

from stalefront.record import COLUMNS, FAMILIES, NAMES, WALL_CLOCK, StepWriter, read_rows, rewind

DATA_FLOW = Path(__file__).parents[1] / "docs" / "data_flow.md"


def write(path, rows):
    writer = StepWriter(path)
    for row in rows:
        writer.append(row)
    writer.close()


def test_non_finite_numbers_come_back_and_null_is_not_nan(tmp_path):
    path = tmp_path / "steps.jsonl"
    write(path, [{"step": 1, "loss": math.nan, "grad_norm_raw": math.inf, "cos_grad": None}])
    (row,) = read_rows(path)
    assert math.isnan(row["loss"])
    assert row["grad_norm_raw"] == math.inf
    assert row["cos_grad"] is None
    assert set(row) == set(NAMES)


def test_an_undeclared_column_is_an_error(tmp_path):
    with pytest.raises(KeyError, match="speed"):
        write(tmp_path / "steps.jsonl", [{"step": 1, "speed": 3}])


def test_a_column_of_a_family_follows_the_declared_ones(tmp_path):
    path = tmp_path / "steps.jsonl"
    write(path, [{"removed_icepop_frac": 0.5, "step": 1}])
    (row,) = read_rows(path)
    assert tuple(row) == (*NAMES, "removed_icepop_frac")


def test_a_torn_last_line_is_left_out_and_the_next_writer_is_not_glued_to_it(tmp_path):
    path = tmp_path / "steps.jsonl"
    write(path, [{"step": 0}, {"step": 1}])
    with path.open("a") as out:
        out.write('{"step":2,"lo')
    assert [row["step"] for row in read_rows(path)] == [0, 1]
    rewind(path, 1, tmp_path / "spare.jsonl")
    write(path, [{"step": 2}])
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2]


def test_rewinding_keeps_what_it_takes_away(tmp_path):
    path, spare = tmp_path / "steps.jsonl", tmp_path / "attempts" / "1" / "steps.jsonl"
    write(path, [{"step": s, "loss": float(s)} for s in range(6)])
    before = path.read_bytes()
    assert rewind(path, 3, spare) == 2
    assert path.read_bytes() + spare.read_bytes() == before
    assert rewind(path, 3, spare) == 0
    assert path.read_bytes() + spare.read_bytes() == before


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0}\nnot json\n{"step": 1}\n')
    with pytest.raises(json.JSONDecodeError):
        list(read_rows(path))


def test_every_column_is_documented():
    text = DATA_FLOW.read_text()
    pairs = ("theta_mu", "theta_old", "old_mu")
    for column in (*COLUMNS, *FAMILIES):
        pair = next((p for p in pairs if column.name.startswith(f"{p}_")), None)
        shown = column.name if pair is None else column.name.replace(pair, "", 1)
        assert shown.removeprefix("_").replace("logratio", "") in text.replace("logratio", ""), column.name
    assert {c.name for c in COLUMNS if c.unit == "s"} == WALL_CLOCK
