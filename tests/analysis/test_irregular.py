"""A search leaves every level of S with learning rates of its own; the report reads such cells like a grid's."""

import pytest

from stalefront.analysis.report import build_report
from stalefront.analysis.tables import build_table, read_run
from stalefront.search.judge import has_collapsed

# What a search asks at each level: few learning rates in common, seeds by turns.
ASKED = {
    1: [(1e-3, 0), (4.22e-3, 1), (7.5e-3, 0), (1e-2, 1)],
    4: [(1e-3, 0), (4.22e-3, 1), (2.37e-3, 0), (1.78e-3, 1), (2.37e-3, 1)],
    16: [(1e-3, 0), (3.16e-4, 1), (5.62e-4, 0)],
    64: [(1e-3, 0)],
}


@pytest.fixture
def searched(tmp_path, cell_config, step_rows, write_cell, write_plan):
    root, cells = tmp_path / "searched", {}
    for S, asked in ASKED.items():
        for lr, seed in asked:
            cells[f"c{S}-{lr!r}-{seed}"] = cell_config(S=S, lr=lr, seed=seed)
    write_plan(root, cells)
    for cell_id, cell in cells.items():
        S, lr = cell["delay"]["S"], cell["optimizer"]["lr"]
        write_cell(root, cell_id, cell, step_rows(cell, collapse_at=8 if S * lr > 8e-3 else None))
    return root


def test_a_report_is_built_from_irregular_cells(searched):
    build_report(searched)
    text = (searched / "report.md").read_text()
    assert "13" in text
    assert list((searched / "figures").glob("*"))
    assert len(build_table(searched).table) == sum(map(len, ASKED.values()))


def test_one_cell_is_judged_as_the_report_judges_it(searched):
    table = build_table(searched).table
    for row in table.to_dict("records"):
        alone = read_run(searched, row["cell_id"])
        assert alone["remains_zero_event"].iloc[0] == row["remains_zero_event"]
        for verdict in ("remains_zero", "first_zero", "half_peak", "below_start"):
            assert has_collapsed(searched, row["cell_id"], verdict) == row[f"{verdict}_event"]
        assert row["remains_zero_event"] == (row["S"] * row["lr"] > 8e-3)


def test_how_a_run_ended_decides_what_is_known(tmp_path, cell_config, step_rows, write_cell, write_plan):
    cell = cell_config(S=4, lr=1e-3, seed=0)
    write_plan(tmp_path, {"dead": cell, "half": cell})
    write_cell(tmp_path, "dead", cell, step_rows(cell, non_finite_at=10), state="non-finite")
    write_cell(tmp_path, "half", cell, step_rows(cell)[:32], state="failed")
    assert has_collapsed(tmp_path, "dead", "remains_zero") is True
    assert has_collapsed(tmp_path, "half", "remains_zero") is None
    assert has_collapsed(tmp_path, "never", "remains_zero") is None
