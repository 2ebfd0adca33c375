"""The command `stalefront` on a directory of recorded files."""

import csv
import io
import json
import subprocess
import sys

import pytest

from stalefront.cli import main


@pytest.fixture
def recorded(tmp_path, make_cell):
    """Two planned cells, one of them failed."""
    cells = [make_cell(seed=seed) for seed in (0, 1)]
    plan = {
        "format": 1,
        "sweep": {"name": "mine", "question": "", "axes": {"seed": [0, 1]}},
        "cells": {c.cell_id: {"overrides": ["steps=8", f"seed={c.seed}"], "cell": c.as_dict()} for c in cells},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    folder = tmp_path / "cells" / cells[1].cell_id
    folder.mkdir(parents=True)
    outcome = {"cell_id": cells[1].cell_id, "state": "failed", "attempt": 1, "reason": "exit code 3", "last_step": 5}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    return tmp_path


@pytest.mark.parametrize("command", ["report", "table", "status"])
def test_a_folder_that_is_no_sweep_is_an_error(tmp_path, capsys, command):
    assert main([command, str(tmp_path / "none")]) == 2
    assert "no sweep directory" in capsys.readouterr().err


@pytest.mark.parametrize("watch", [[], ["--watch"]])
def test_status_shows_every_cell_with_what_varies(recorded, capsys, watch):
    assert main(["status", str(recorded), *watch]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "mine: " in lines[0]
    assert "1 failed" in lines[0]
    assert lines[2].split()[1:] == ["failed", "1", "5", "8", "seed=1", "(exit", "code", "3)"]
    assert lines[3].split()[1:] == ["planned", "0", "8", "seed=0"]


def test_table_is_csv_with_a_row_a_cell(recorded, capsys):
    assert main(["table", str(recorded)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["state"] for row in rows} == {"failed", "missing"}


def test_report_is_built_and_named(recorded, capsys):
    assert main(["report", str(recorded)]) == 0
    assert capsys.readouterr().out.strip() == str(recorded / "report.html")
    assert (recorded / "report.html").exists()


def test_status_imports_neither_torch_nor_the_analysis(recorded):
    code = (
        "import sys; from stalefront.cli import main; code = main(['status', sys.argv[1]]); "
        "sys.exit(code or bool({'torch', 'pandas', 'hydra', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(recorded)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
