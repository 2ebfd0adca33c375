"""The run table: a row a planned cell, whatever became of it."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from stalefront.analysis.settings import ReportSettings, arm_labels, flatten, staleness
from stalefront.analysis.tables import build_table, write_table
from stalefront.claims import Claim, place, start_of
from stalefront.observe import observe
from stalefront.paths import CellPaths


@pytest.fixture(scope="module")
def table(demo):
    return build_table(demo).table


def only(table, S, lr, seed):
    rows = table[(table["S"] == S) & (table["lr"] == lr) & (table["seed"] == seed)].to_dict("records")
    assert len(rows) == 1
    return rows[0]


def test_every_planned_cell_is_a_row(table):
    assert len(table) == 24
    assert table["cell_id"].is_unique
    assert table["state"].value_counts().to_dict() == {
        "completed": 20,
        "missing": 1,
        "failed": 1,
        "non-finite": 1,
        "running": 1,
    }


def test_a_missing_cell_keeps_its_settings_and_says_why(table):
    row = only(table, 1, 1e-3, 1)
    assert row["state"] == "missing"
    assert "no directory" in row["reason"]
    assert row["kind"] == "undecided"
    assert row["last_step"] is None
    assert row["first_zero_event"] is None
    assert row["remains_zero_censor_step"] is None


def test_a_cell_with_a_directory_but_no_status_is_planned(sweep):
    (sweep / "cells" / "c0-0001-0.001-1").mkdir()
    row = only(build_table(sweep).table, 1, 1e-3, 1)
    assert (row["state"], row["reason"]) == ("planned", "not started yet")


def test_a_failed_cell_is_censored_never_stable(table):
    row = only(table, 1, 8e-3, 1)
    assert row["reason"] == "RuntimeError: boom"
    assert row["kind"] == "undecided"
    assert row["end"] == "failed"
    assert (row["first_zero_censor_step"], row["first_zero_censor_reason"]) == (31, "failed")


def test_a_run_to_the_horizon_is_right_censored_there(table):
    row = only(table, 1, 2e-3, 0)
    assert row["kind"] == "stable"
    assert row["remains_zero_event"] is False
    assert (row["remains_zero_censor_step"], row["remains_zero_censor_reason"]) == (64, "horizon")
    assert row["lr_sum_end"] == pytest.approx(2e-3 * (64 - 1.5))


def test_a_collapse_has_an_interval_in_steps_and_in_learning_rate(table):
    row = only(table, 16, 2e-3, 0)
    assert row["kind"] == "collapsed for good"
    assert (row["remains_zero_step_lo"], row["remains_zero_step_hi"]) == (4, 8)
    # Warm-up: .25 + .5 + .75 + 1 in the first four steps.
    assert row["remains_zero_lr_sum_lo"] == pytest.approx(2e-3 * 2.5)
    assert row["remains_zero_lr_sum_hi"] == pytest.approx(2e-3 * 6.5)
    assert row["remains_zero_censor_step"] is None
    assert json.loads(row["remains_zero_evidence"])["passes"] == 0


def test_a_recovering_run_is_told_apart(table):
    row = only(table, 4, 4e-3, 0)
    assert row["kind"] == "touched zero and recovered"
    assert row["recovered"] is True
    assert row["n_dips"] == 1
    assert row["dwell_steps"] >= 16


def test_a_non_finite_run_collapses_with_its_cause(table):
    row = only(table, 16, 8e-3, 1)
    assert row["kind"] == "collapsed for good"
    assert row["half_peak_event"] is True
    assert row["reward_points_non_finite"] == 1
    assert math.isnan(row["reward_final"])


def test_realised_lag_and_regime(table):
    row = only(table, 4, 2e-3, 0)
    assert row["lag_mean_updates"] == pytest.approx(1.5)
    assert row["lag_max_updates"] == 3.0
    assert row["regime"] == "diffusive"
    assert row["growth_exponent"] == pytest.approx(0.5, abs=0.02)
    assert row["cos_within"] == pytest.approx(0.6, abs=0.05)
    assert row["cos_refresh"] == pytest.approx(0.08, abs=0.05)


def test_table_csv_is_the_same_bytes_twice_and_keeps_types(demo):
    first, second = (write_table(build_table(demo).table) for _ in range(2))
    assert first == second
    lines = first.decode().splitlines()
    assert len(lines) == 25
    assert "true" in lines[-1]
    assert ",nan," in first.decode()


def test_reward_train_on_request(demo):
    table = build_table(demo, ReportSettings(reward="reward_train")).table
    row = only(table, 16, 2e-3, 0)
    assert row["reward_points"] == 65
    assert row["n_per_point"] == 64


def test_curves_are_thinned_for_drawing_but_not_for_the_verdicts(demo):
    full, thin = build_table(demo), build_table(demo, ReportSettings(max_points=4))
    assert thin.curves.groupby("cell_id").size().max() == 4
    assert thin.curves["step"].max() == 64
    assert full.table["remains_zero_step_hi"].tolist() == thin.table["remains_zero_step_hi"].tolist()


def test_an_unreadable_outcome_is_a_reason_not_a_crash(sweep):
    path = next((sweep / "cells").glob("c0-0001-0.002-0")) / "outcome.json"
    path.write_text("{")
    row = only(build_table(sweep).table, 1, 2e-3, 0)
    assert row["state"] == "completed"
    assert "outcome.json is not readable" in row["reason"]


def test_a_later_attempt_in_the_status_wins_over_an_old_outcome(sweep):
    directory = next((sweep / "cells").glob("c0-0001-0.002-0"))
    status = {"state": "running", "attempt": 2, "step": 8, "steps": 64}
    (directory / "status.json").write_text(json.dumps(status))
    row = only(build_table(sweep).table, 1, 2e-3, 0)
    assert row["state"] == "running"


@pytest.fixture
def gone():
    """Claim of a process of this machine that has ended."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        return claim_of(process.pid, start=1)


def claim_of(pid, start, attempt=1):
    return asdict(Claim(attempt, *place(), pid, start, "", ""))


STATES = {
    "killed": ("running", 1, ("interrupted", "its process ended without a word")),
    "killed before its first status": ("failed", 2, ("interrupted", "its process ended without a word")),
    "stopped": ("interrupted", 1, ("interrupted", "asked to stop")),
}


@pytest.mark.parametrize("name", STATES)
def test_a_cell_whose_process_is_gone_does_not_run(sweep, gone, name):
    state, attempt, expected = STATES[name]
    directory = next((sweep / "cells").glob("c0-0004-0.001-0"))
    reason = "asked to stop" if state == "interrupted" else ""
    status = {"state": state, "attempt": 1, "step": 8, "steps": 64, "reason": reason}
    (directory / "status.json").write_text(json.dumps(status))
    if name != "killed":
        (directory / "outcome.json").write_text(json.dumps(status))
    (directory / f"claim.{attempt}").write_text(json.dumps({**gone, "attempt": attempt}))
    row = only(build_table(sweep).table, 4, 1e-3, 0)
    assert (row["state"], row["reason"]) == expected
    assert row["end"] == expected[0]
    seen = observe(CellPaths(directory))
    assert (seen.state, seen.reason) == expected, "both readings of the files agree"


def test_a_cell_whose_process_lives_runs(sweep):
    directory = next((sweep / "cells").glob("c0-0004-0.001-0"))
    (directory / "claim.1").write_text(json.dumps(claim_of(os.getpid(), start_of(os.getpid()))))
    row = only(build_table(sweep).table, 4, 1e-3, 0)
    assert (row["state"], row["reason"]) == ("running", None)


def test_claims_change_nothing_about_finished_cells(demo, sweep, gone):
    before = write_table(build_table(demo).table)
    for outcome in sweep.glob("cells/*/outcome.json"):
        outcome.with_name("claim.1").write_text(json.dumps(gone))
    assert write_table(build_table(sweep).table) == before


def test_a_run_stopped_on_request_is_not_stable(tmp_path, cell_config, step_rows, write_cell, write_plan):
    cell = cell_config(S=1, lr=1e-3, seed=0)
    write_plan(tmp_path, {"a": cell})
    write_cell(tmp_path, "a", cell, step_rows(cell)[:33])
    row = build_table(tmp_path).table.iloc[0]
    assert row["end"] == "stopped"
    assert row["kind"] == "undecided"


def test_one_point_that_is_too_small_is_undecidable(tmp_path, cell_config, step_rows, write_cell, write_plan):
    cell = cell_config(S=1, lr=1e-3, seed=0, steps=8)
    write_plan(tmp_path, {"a": cell})
    write_cell(tmp_path, "a", cell, step_rows(cell, samples=16))
    row = build_table(tmp_path).table.iloc[0]
    assert row["first_zero_event"] is None
    assert "n=48" in json.loads(row["first_zero_evidence"])["reason"]


@pytest.mark.parametrize(
    ("delay", "expected"),
    [
        ({"choice": "none"}, (1, "none")),
        ({"choice": "reuse", "S": 16}, (16, "reuse")),
        ({"choice": "lag", "lag_updates": 15}, (16, "lag")),
        ({"choice": "lag", "lag_updates": 0}, (1, "lag")),
        ({}, (None, "unknown")),
    ],
)
def test_staleness_of_a_cell(delay, expected):
    assert staleness({"delay": delay}) == expected


def labels(cell_config, *changes, **common):
    cells = {str(i): cell_config(**{"S": 4, "lr": 1e-3, "seed": 0, **common, **c}) for i, c in enumerate(changes)}
    return list(arm_labels(cells).values())


def test_arm_labels(cell_config):
    assert labels(cell_config, {"lr": 1e-3}, {"lr": 2e-3, "S": 8, "seed": 3}) == ["all", "all"]
    assert labels(cell_config, {"loss.beta": 0.0}, {"loss.beta": 0.04}) == ["beta=0.0", "beta=0.04"]
    # A choice stands for the options it determines.
    cispo = {"loss.choice": "cispo", "loss.epsilon_high": 5}
    assert labels(cell_config, {}, cispo) == ["loss=grpo", "loss=cispo"]
    # Unless the sweep set the option itself.
    cells = {"a": cell_config(S=4, lr=1e-3, seed=0), "b": cell_config(S=4, lr=1e-3, seed=0, **cispo)}
    assert arm_labels(cells, frozenset({"loss.epsilon_high"}))["b"] == "loss=cispo, epsilon_high=5"
    # A second setting that varies with the first is still named: it may be the cause.
    both = labels(cell_config, {"loss.beta": 0.0, "steps": 64}, {"loss.beta": 0.04, "steps": 128})
    assert both == ["beta=0.0, steps=64", "beta=0.04, steps=128"]
    tis = [{"choice": "token_tis", "cap": 2.0, "anchor": "theta/mu"}]
    assert labels(cell_config, {}, {"correction": tis}) == ["correction=none", "correction=token_tis"]


def test_on_policy_cells_join_the_only_kind_of_delay(cell_config):
    assert labels(cell_config, {"kind": "none"}, {"kind": "reuse"}) == ["all", "all"]
    three = labels(cell_config, {"kind": "none"}, {"kind": "reuse"}, {"kind": "lag"})
    assert three == ["delay=none", "delay=reuse", "delay=lag"]


def test_flatten_names_list_entries_by_choice():
    flat = flatten({"correction": [{"choice": "a", "cap": 2}, {"choice": "b"}], "optimizer": {"betas": [0.9, 0.95]}})
    assert flat == {"correction.choice": "a+b", "correction.a.cap": 2, "optimizer.betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    "fields", [{"reward": "loss"}, {"level": 0.2}, {"max_arms": 0}, {"definitions": ()}, {"max_points": 1}]
)
def test_senseless_settings_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        ReportSettings(**fields)
