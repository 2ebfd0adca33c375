"""The loop as a whole: determinism, accumulation, the horizon, and what non-finite weights do."""

import math

import pytest

from stalefront.record import NAMES

ALWAYS_NULL = {"weight_mean", "weight_min", "mask_frac"}


def test_the_same_cell_gives_the_same_records(make_cell, run_in, tmp_path, numbers):
    cell = make_cell(steps=12)
    first, second = (run_in(tmp_path / name, cell) for name in ("a", "b"))
    assert numbers(first.rows) == numbers(second.rows)


def test_another_seed_gives_others(make_cell, completed, numbers):
    assert numbers(completed(make_cell()))[1:] != numbers(completed(make_cell(seed=1)))[1:]


def test_every_column_is_filled(make_cell, completed):
    rows = completed(make_cell())
    assert set(rows[0]) == set(NAMES)
    last = rows[-1]
    assert {name for name in NAMES if last[name] is None} == ALWAYS_NULL
    corrected = completed(make_cell(loss="reinforce", correction=["token_tis"]))[-1]
    assert all(corrected[name] is not None for name in NAMES)


def test_validation_at_start_every_so_often_and_at_the_end(make_cell, completed):
    rows = completed(make_cell(steps=10))
    assert [r["step"] for r in rows if r["reward_val"] is not None] == [0, 4, 8, 10]
    assert all(r["reward_val_n"] == 16 for r in rows if r["reward_val"] is not None)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo", "cispo"])
def test_accumulated_gradients_are_the_whole_batchs(make_cell, completed, loss):
    # Rounding differs from the first step on, and sampling turns it into another token sooner or later, so only
    # steps on the first batch are compared.
    cell = {"steps": 4, "loss": loss, "loss.beta": 0.04, "optimizer.warmup_steps": 0}
    whole = completed(make_cell(**cell))
    parts = completed(make_cell(**cell, **{"optimizer.grad_accum": 4}))
    for a, b in zip(whole[1:], parts[1:], strict=True):
        for name in ("loss", "grad_norm_raw", "update_norm", "entropy_nats", "kl_ref_k3_nats", "ess_seq_frac"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6), name
        assert a["tokens"] == b["tokens"]
        assert a["version"] == b["version"] == a["step"]


def test_on_policy_cosines_and_distances_hang_together(make_cell, completed):
    rows = completed(make_cell(delay="none", optimizer="sgd", **{"optimizer.warmup_steps": 0, "optimizer.lr": 1e-3}))[
        1:
    ]
    assert rows[0]["cos_grad"] is None
    for row in rows[1:]:
        # Plain SGD: the update is the applied gradient times the rate.
        assert row["cos_update"] == pytest.approx(row["cos_grad"], abs=1e-3)
        assert row["update_norm"] == pytest.approx(row["lr_applied"] * row["grad_norm_applied"], rel=1e-3)
    assert rows[0]["dist_from_start"] == pytest.approx(rows[0]["update_norm"])
    walked = sum(r["update_norm"] for r in rows)
    assert rows[-1]["dist_from_start"] <= walked


def test_weights_that_are_gone_end_the_run_and_are_recorded(make_cell, run_in, tmp_path):
    cell = make_cell(optimizer="sgd", steps=20, **{"optimizer.lr": 1e38, "optimizer.max_grad_norm": None})
    ran = run_in(tmp_path, cell)
    assert ran.outcome["state"] == "non-finite"
    assert ran.outcome["reason"] == "parameters are not finite"
    last = ran.rows[-1]
    assert last["step"] == ran.outcome["last_step"] < 20
    assert not math.isfinite(last["dist_from_start"])


def test_an_exception_becomes_a_failed_outcome(make_cell, run_in, tmp_path, monkeypatch):
    monkeypatch.setattr("stalefront.loop.Learner.advance", lambda self: 1 / 0)
    ran = run_in(tmp_path, make_cell())
    assert ran.outcome["state"] == "failed"
    assert ran.outcome["reason"] == "ZeroDivisionError: division by zero"
    assert "Traceback" in ran.outcome["error"]


def test_the_outcome_says_what_computed_it(make_cell, run_in, tmp_path):
    outcome = run_in(tmp_path, make_cell()).outcome
    assert outcome["wall_s"] > 0
    assert outcome["cpu_s"] > 0
    assert outcome["peak_rss_bytes"] > 50 * 2**20
    assert set(outcome["versions"]) == {"python", "torch", "transformers", "trl", "stalefront"}
    assert outcome["attempt"] == 1
    assert outcome["resumed_from_step"] == 0


@pytest.mark.parametrize("keep", [True, False])
def test_a_finished_cells_checkpoint_is_kept_only_when_asked_for(keep, make_cell, run_in, tmp_path):
    ran = run_in(tmp_path, make_cell(), checkpoint_every=5, keep_checkpoint=keep)
    assert ran.outcome["state"] == "completed"
    assert ran.paths.checkpoint.exists() == keep
