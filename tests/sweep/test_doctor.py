"""The command `stalefront doctor` on directories of recorded files."""

import json

import pytest

from stalefront.cli import main
from stalefront.files import write_json
from stalefront.paths import SweepPaths


@pytest.fixture
def recorded(tmp_path, make_cell):
    """`recorded(misaligned, …)`: a sweep with a cell of three steps for each share of misaligned tokens."""

    def write(*shares, **known):
        paths = SweepPaths(tmp_path / "mine")
        cells = {cell.cell_id: cell for cell in (make_cell(seed=seed) for seed in range(len(shares)))}
        entries = {cell_id: {"overrides": [], "cell": cell.as_dict()} for cell_id, cell in cells.items()}
        write_json(paths.plan, {"format": 1, "sweep": {"name": "mine"}, "cells": entries})
        for (cell_id, cell), share in zip(cells.items(), shares, strict=True):
            at = paths.cell(cell_id)
            write_json(at.config, {"format": 1, "cell_id": cell_id, "cell": cell.as_dict()})
            rows = [{"step": 0, "version": 0}] + [row(step, share) | known for step in (1, 2, 3)]
            at.steps.write_text("".join(json.dumps(one) + "\n" for one in rows))
        return paths, list(cells)

    return write


def row(step, share):
    place = {"step": step, "batch": step, "at_refresh": True, "version": step, "stepped": True, "tokens": 100}
    lag = {f"lag_{name}_updates": 0.0 for name in ("mean", "max", "gen_mean")}
    moments = {
        f"mismatch_{name}": 0.0 for name in ("k1_nats", "k3_nats", "logratio_abs_mean", "logratio_sd_nats", "chi2")
    }
    tokens = {"surprisal_gap_nats": 0.0, "surprisal_gap_se_nats": 0.1, "kv_stale_frac": 0.0}
    return {**place, **lag, **moments, **tokens, "theta_mu_logratio_mean": 0.0, "misaligned_frac": share,
            "expert_flip_frac": None, "route_fallback_frac": None}  # fmt: skip


def test_a_quiet_sweep(recorded, capsys):
    paths, _ = recorded(0.0, None)
    assert main(["doctor", str(paths.root)]) == 0
    assert capsys.readouterr().out == "mine: 2 cells, nothing found\n"


def test_what_is_found_where_and_the_way_out(recorded, capsys):
    paths, (_, some, most) = recorded(0.0, 0.01, 0.25)
    assert main(["doctor", str(paths.root)]) == 1
    head, blank, words, evidence, fix = capsys.readouterr().out.splitlines()
    assert (head, blank) == ("mine: 3 cells, 1 finding", "")
    assert words.startswith("problem retokenised: Text was encoded again")
    assert evidence.startswith(
        f"  In 2 of 3 cells, most in {most}: 0.25 of the sampled tokens in 3 of 3 rollout batches"
    )
    assert fix.startswith("  Fix: Hand token ids on")
    assert main(["doctor", str(paths.cell(some).root)]) == 1
    head, _, _, evidence, _ = capsys.readouterr().out.splitlines()
    assert head == f"{some}: 1 cell, 1 finding"
    assert evidence.startswith("  0.01 of the sampled tokens")


def test_what_cannot_be_checked_is_said(recorded, capsys):
    paths, ids = recorded(0.0, 0.0, surprisal_gap_nats=None)
    assert main(["doctor", str(paths.root)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "mine: 2 cells, nothing found"
    assert out[2:] == [
        "Could not be checked:",
        "  logged-raw: it was never measured (2 cells)",
        "  temperature: it was never measured (2 cells)",
    ]
    paths.cell(ids[0]).steps.unlink()
    main(["doctor", str(paths.root)])
    assert "  retokenised: it has no learner step yet (1 cell)" in capsys.readouterr().out


def test_json_holds_the_same(recorded, capsys):
    paths, (quiet, most) = recorded(0.0, 0.25)
    assert main(["doctor", str(paths.root), "--json"]) == 1
    got = json.loads(capsys.readouterr().out)
    assert (got["format"], got["name"], got["cells"], got["unchecked"]) == (1, "mine", 2, [])
    (finding,) = got["findings"]
    assert (finding["id"], finding["severity"], finding["worst"]) == ("retokenised", "problem", most)
    assert finding["numbers"] == {"misaligned_frac": 0.25, "batches": 3}
    assert main(["doctor", str(paths.cell(quiet).root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_a_directory_that_cannot_be_read(recorded, tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "none")]) == 2
    assert "a folder with a plan.json, or a cell's" in capsys.readouterr().err
    paths, (only,) = recorded(0.0)
    paths.cell(only).steps.write_text("nonsense\n{}\n")
    assert main(["doctor", str(paths.root)]) == 2
    error = capsys.readouterr().err
    assert "steps.jsonl holds a line that is not a step record" in error
    assert "Restore the file" in error


def test_a_cell_that_ran_without_mismatch_and_one_with_it(tmp_path, run_in, make_cell, capsys):
    ran = run_in(tmp_path / "plain", make_cell(delay="none"))
    assert ran.outcome["state"] == "completed", ran.outcome["error"]
    assert main(["doctor", str(tmp_path / "plain")]) == 0
    assert capsys.readouterr().out == "plain: 1 cell, nothing found\n"
    run_in(tmp_path / "cut", make_cell(delay="none", mismatch=["top_p"]))
    assert main(["doctor", str(tmp_path / "cut"), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["id"] == "truncated-support"
    assert finding["numbers"]["k1_nats"] > 10 * finding["numbers"]["k3_nats"]
    assert finding["evidence"].endswith("configured mismatch: top_p")
