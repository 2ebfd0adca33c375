"""What is recorded of planned cells, and what of a record is believed later."""

import json

import pytest

from stalefront.choice import OptionError
from stalefront.compose import Planned
from stalefront.files import read_json, write_json
from stalefront.paths import SweepPaths
from stalefront.plan import Header, record_plan

HEADER = Header("grid", "", {})
RUN = {"checkpoint_every": 64, "keep_checkpoint": False, "cache_dir": None}


@pytest.fixture
def plan(make_cell, tmp_path):
    """`plan(path)`: plans the cell of a data file; returns the cell."""

    def run(path):
        cell = make_cell(task="file", **{"task.path": str(path), "task.num_prompts": 2})
        record_plan(SweepPaths(tmp_path / "sweep"), HEADER, [Planned(cell, RUN, (f"task.path={path}",))])
        return cell

    return run


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n}", "answer": n}) + "\n" for n in range(10)))
    return path


def test_a_file_that_moved_is_one_cell_whose_record_follows_it(plan, data, tmp_path):
    first = plan(data)
    moved = data.rename(tmp_path / "moved.jsonl")
    again = plan(moved)
    assert again.cell_id == first.cell_id
    paths = SweepPaths(tmp_path / "sweep")
    assert read_json(paths.cell(first.cell_id).config)["cell"]["task"]["path"] == str(moved)
    assert list(read_json(paths.plan)["cells"]) == [first.cell_id]


def test_a_finished_cell_keeps_its_record(plan, data, tmp_path):
    first = plan(data)
    cell = SweepPaths(tmp_path / "sweep").cell(first.cell_id)
    write_json(cell.outcome, {"state": "completed", "reason": "", "attempt": 1})
    plan(data.rename(tmp_path / "moved.jsonl"))
    assert read_json(cell.config)["cell"]["task"]["path"] == str(data)


def test_an_edited_file_is_a_second_cell(plan, data, tmp_path):
    first = plan(data)
    data.write_text(data.read_text().replace("p3", "q3"))
    second = plan(data)
    assert set(read_json(SweepPaths(tmp_path / "sweep").plan)["cells"]) == {first.cell_id, second.cell_id}
    assert first.cell_id != second.cell_id


def test_an_edited_record_is_refused(plan, data, tmp_path):
    cell = plan(data)
    config = SweepPaths(tmp_path / "sweep").cell(cell.cell_id).config
    record = read_json(config)
    record["cell"]["task"]["temperature"] = 0.5
    write_json(config, record)
    with pytest.raises(OptionError, match="It was edited or belongs elsewhere"):
        plan(data)
