"""The report: complete, the same bytes twice, readable in every degenerate case, no number that isn't in a fit."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stalefront.analysis.fits.base import Constant, Fit, Interval
from stalefront.analysis.narrative import judge_slope, say_s_eta, show, show_interval, slope_of
from stalefront.analysis.report import build_report
from stalefront.analysis.settings import ReportSettings
from stalefront.analysis.verdicts import FirstZero, RemainsZero


def contents(files):
    paths = [files.html, files.markdown, files.table, files.fits, *files.figures]
    return {p.name: p.read_bytes() for p in paths}


@pytest.fixture(scope="module")
def reported(demo, tmp_path_factory):
    """A report of the demo sweep, built once: its directory, files and bytes."""
    directory = Path(shutil.copytree(demo, tmp_path_factory.mktemp("report") / "demo"))
    files = build_report(directory)
    return directory, files, contents(files)


def test_rebuilt_elsewhere_from_the_same_files_it_is_the_same_bytes(sweep, reported):
    _, _, first = reported
    assert contents(build_report(sweep)) == first


def test_nothing_else_is_left_behind(reported):
    directory, _, _ = reported
    assert {p.name for p in directory.iterdir()} == {
        "plan.json",
        "cells",
        "figures",
        "report.html",
        "report.md",
        "table.csv",
        "fits.json",
    }
    assert not list(directory.rglob("*.tmp"))


def test_the_page_needs_nothing_else(reported):
    directory, files, _ = reported
    page = files.html.read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "<script" not in page
    assert page.count("data:image/png;base64,") == 4
    assert str(directory) not in page


def test_the_report_says_what_was_found(reported):
    _, files, _ = reported
    text = files.markdown.read_text()
    assert "24 cells planned (20 completed, 1 non-finite, 1 failed, 1 missing, 1 running)" in text
    assert "2 touched zero and recovered" in text
    assert "did not collapse within T" in text
    assert "stable |" not in text
    assert "RuntimeError: boom" in text
    assert "commit: 0123456789abcdef" in text
    assert "The two definitions of collapse disagree on 2 cells" in text


def test_numbers_in_the_text_come_from_fits_json(reported):
    _, files, _ = reported
    fits = json.loads(files.fits.read_text())["fits"]
    assert {f["name"] for f in fits} == {"eta_max", "s_eta", "firth", "t_eta"}
    assert all(len(f["input_hash"]) == 64 for f in fits)
    found = {(f["name"], f["definition"]): f["constants"] for f in fits}
    text = files.markdown.read_text()
    for law, name in (("firth", "slope"), ("firth", "S_eta50"), ("t_eta", "t_eta")):
        constant = found[(law, "remains_zero")][name]
        assert show(constant["value"]) in text
        assert show(constant["interval"]["lo"]) in text


SMALL = {"S": (1, 16), "lrs": (1e-3, 8e-3), "seeds": (0,), "steps": 32}


def test_figures_of_an_earlier_report_go_away(tmp_path, make_sweep):
    sweep = make_sweep(tmp_path / "s", **SMALL)
    (sweep / "figures").mkdir()
    (sweep / "figures" / "old.png").write_bytes(b"x")
    (sweep / "figures" / "mine.txt").write_text("kept")
    build_report(sweep)
    names = {p.name for p in (sweep / "figures").iterdir()}
    assert "old.png" not in names
    assert "mine.txt" in names


DEGENERATE = {
    "one cell": {"S": (4,), "lrs": (1e-3,), "seeds": (0,)},
    "one S": {"S": (16,)},
    "one learning rate": {"lrs": (2e-3,)},
    "all collapsed": {"S": (16, 64), "lrs": (4e-3, 8e-3)},
    "none collapsed": {"S": (1, 2), "lrs": (1e-4, 2e-4)},
    "a single seed": {"seeds": (0,)},
    "lag": {"kind": "lag", "S": (1, 4)},
    "odd learning rates": {"lrs": (0.0, 3.3e-7, 1.0)},
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_sweeps_have_a_report(tmp_path, make_sweep, name):
    shape = {"lrs": (2e-3, 8e-3), "seeds": (0, 1), "steps": 32, **DEGENERATE[name]}
    settings = ReportSettings(definitions=(FirstZero(), RemainsZero()))
    files = build_report(make_sweep(tmp_path / "s", **shape), settings=settings)
    text = files.markdown.read_text()
    assert "nan" not in text.lower().replace("finance", "")
    assert "None" not in re.sub(r"None: every planned cell", "", text)
    if name in ("one cell", "one S", "one learning rate", "all collapsed", "none collapsed"):
        assert "No slope is fitted" in text or "does not bound" in text or "slope" in text


def test_nothing_finished_yet(tmp_path, make_sweep):
    skip = {(s, lr, seed) for s in (1, 4) for lr in (1e-3, 2e-3) for seed in (0, 1)}
    files = build_report(make_sweep(tmp_path / "s", S=(1, 4), lrs=(1e-3, 2e-3), skip=skip))
    text = files.markdown.read_text()
    assert "8 cells planned (8 missing)" in text
    assert "no decided cell yet" in text


def test_when_nothing_is_decided_the_reason_comes_first(tmp_path, cell_config, step_rows, write_cell, write_plan):
    cells = {f"c{seed}": cell_config(S=1, lr=1e-3, seed=seed, steps=8) for seed in range(4)}
    write_plan(tmp_path / "s", cells)
    for cell_id, cell in list(cells.items())[:3]:
        write_cell(tmp_path / "s", cell_id, cell, step_rows(cell, samples=16))
    text = build_report(tmp_path / "s").markdown.read_text()
    short = text.partition("## In short")[2].split("\n- ")[2]
    assert short.startswith("No cell is decided. The most common reason, in 3 of 4 cells: n=48 samples")
    assert "a window needs 300" in short
    assert "Raise validation.num_samples" in short


def test_the_reason_of_cells_that_never_ran_is_their_state(tmp_path, make_sweep):
    skip = {(1, 1e-3, 0), (16, 1e-3, 0)}
    files = build_report(make_sweep(tmp_path / "s", S=(1, 16), lrs=(1e-3,), seeds=(0,), skip=skip))
    text = files.markdown.read_text()
    assert "No cell is decided. The reason, in 2 of 2 cells: the cell is missing (no directory" in text
    assert "validation.num_samples, lower" not in text


def test_an_empty_plan(tmp_path, write_plan):
    write_plan(tmp_path / "s", {})
    assert "Nothing is planned" in build_report(tmp_path / "s").markdown.read_text()


def test_arms_have_sections_of_their_own_up_to_a_cap(tmp_path, make_sweep):
    arms = [{"loss.beta": b} for b in (0.0, 0.04, 0.1)]
    root = make_sweep(tmp_path / "s", arms=arms, **SMALL)
    files = build_report(root, settings=ReportSettings(max_arms=2))
    text = files.markdown.read_text()
    assert "# Arm: beta=0.0 (4 cells)" in text
    assert "# Arm: beta=0.1" not in text
    assert "1 further arm(s) have no section" in text
    assert "| beta=0.1 |" in text
    assert len(files.figures) == 2 * (4 * 2 + 1), "PNG and CSV: four figures an arm, one of all arms"


def test_text_from_files_cannot_break_the_page(tmp_path, make_sweep, cell_config, write_cell, write_plan):
    cell = cell_config(S=1, lr=1e-3, seed=0)
    write_plan(tmp_path / "s", {"a": cell}, question="<script>alert(1)</script> | a & b?")
    write_cell(tmp_path / "s", "a", cell, [], state="interrupted", reason="a | b\nc <b>")
    files = build_report(tmp_path / "s")
    assert "<script" not in files.html.read_text()
    row = next(line for line in files.markdown.read_text().splitlines() if "interrupted |" in line)
    assert "a \\| b c" in row


def test_the_analysis_imports_no_torch():
    code = "import sys, stalefront.analysis.report; assert 'torch' not in sys.modules and 'hydra' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("lo", "hi", "tag"),
    [
        (-1.4, -0.5, "1/S, not flat"),
        (-0.4, 0.2, "flat, not 1/S"),
        (-0.7, -0.2, "neither 1/S nor flat"),
        (-2.0, 0.1, "cannot tell"),
        (None, -0.5, "1/S, not flat"),
        (None, None, "cannot tell"),
        (0.2, None, "neither 1/S nor flat"),
    ],
)
def test_slopes_are_held_against_one_over_s_and_flat(lo, hi, tag):
    assert judge_slope(Interval(lo, hi, "profile", 0.95), "The interval").tag == tag


def test_intervals_in_words():
    assert show_interval(Interval(None, -0.5, "profile", 0.95)) == "[unbounded below, −0.5], 95% profile interval"
    assert show_interval(Interval(1.6e-6, 3.2e-6, "bracket")) == "[1.6e−6, 3.2e−6), bracket by the grid"
    assert show_interval(None) == "no interval"


def fit(name, constants):
    return Fit(name, "d", "all", constants, 3, 1, 1, 1, 0, "m", {}, "0" * 64, notes=["no cell of 3 collapsed"])


def test_without_a_surface_the_brackets_speak():
    slope = Constant(None, Interval(-2.3, -1.2, "set"), "1", "slope")
    text, judgement = slope_of(fit("firth", {}), fit("s_eta", {"slope_conservative": slope}))
    assert "conservative" in text
    assert judgement.tag == "neither 1/S nor flat"
    assert slope_of(fit("firth", {}), None)[1].sentence == "No slope is fitted: no cell of 3 collapsed."


def test_s_eta_sentences_say_when_there_is_no_constant():
    constants = {
        "S_eta_max_conservative": Constant(None, None, "η", ""),
        "S_eta_max_optimistic": Constant(None, Interval(6.4e-6, 8e-6, "bracket"), "η", ""),
        "slope_conservative": Constant(None, Interval(-2.3, -1.2, "set"), "1", ""),
        "slope_optimistic": Constant(None, Interval(-1.2, 0.0, "set"), "1", ""),
    }
    conservative, optimistic = say_s_eta(fit("s_eta", constants))
    assert "no single S·η_max" in conservative
    assert "3 values of S" in conservative
    assert "[6.4e−6, 8e−6)" in optimistic


def test_non_finite_numbers_never_reach_fits_json():
    odd = fit("t_eta", {"cv": Constant(math.nan, Interval(-math.inf, 1.0, "t", 0.95), "1", "")})
    assert json.dumps(odd.to_json(), allow_nan=False)
