"""On a CUDA device: the same cell as on the CPU to rounding, twice the same records, a resume, and two devices."""

from pathlib import Path

import pytest
import torch

from stalefront.app import run as command
from stalefront.files import read_json
from stalefront.record import read_rows

MISMATCH = Path(__file__).parents[1] / "conf" / "mismatch"

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def test_first_steps_agree_with_the_cpu(make_cell, completed):
    # The warm-ups are trained on either device and differ in rounding, so only coarse agreement is owed.
    cpu, cuda = (completed(make_cell(device=device, steps=2)) for device in ("cpu", "cuda"))
    assert cuda[1]["theta_old_ratio_max"] == 1.0
    assert cuda[1]["tokens"] == pytest.approx(cpu[1]["tokens"], rel=0.05)
    assert cuda[1]["entropy_nats"] == pytest.approx(cpu[1]["entropy_nats"], rel=0.05)


def test_two_runs_are_the_same(make_cell, run_in, tmp_path, numbers):
    cell = make_cell(device="cuda", steps=12)
    assert numbers(run_in(tmp_path / "a", cell).rows) == numbers(run_in(tmp_path / "b", cell).rows)


def test_a_resumed_run_is_the_same(make_cell, run_in, tmp_path, numbers):
    cell = make_cell(device="cuda", steps=12)
    whole = run_in(tmp_path / "whole", cell)
    parts = run_in(tmp_path / "parts", cell, checkpoint_every=5)
    lines = parts.paths.steps.read_text().splitlines(keepends=True)
    parts.paths.steps.write_text("".join(lines[:12]))
    again = run_in(tmp_path / "parts", cell, checkpoint_every=5, attempt=2)
    assert again.outcome["resumed_from_step"] == 10
    assert numbers(again.rows) == numbers(whole.rows)


def test_two_devices_agree_with_one(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    small = ("device=cuda", "steps=4", "model.warmup.steps=100", "hydra.launcher.report=false")
    assert command(["-m", "sweep=null", *small, "model.ranks=1,2", f"hydra.sweep.dir={tmp_path}"]) == 0
    plan = read_json(tmp_path / "plan.json")["cells"]
    one, two = (list(read_rows(tmp_path / "cells" / cell_id / "steps.jsonl")) for cell_id in plan)
    assert two[1]["theta_old_ratio_max"] == 1.0
    assert two[1]["reward_train"] == one[1]["reward_train"]
    assert two[1]["grad_norm_raw"] == pytest.approx(one[1]["grad_norm_raw"], rel=1e-3)


@pytest.mark.parametrize("entry", sorted(path.stem for path in MISMATCH.glob("*.yaml") if path.stem != "none"))
def test_every_mismatch_runs_and_is_measured(entry, make_cell, completed):
    experts = entry.startswith(("router", "expert"))
    model = {"model": "tiny_moe", "replay": "r3"} if experts else {}
    rows = completed(make_cell(device="cuda", steps=6, mismatch=[entry], **model, **{"delay.S": 2}))
    assert all(row["mismatch_k3_nats"] >= 0 for row in rows[1:])
    if entry == "parity":
        assert all(row["old_mu_logratio_abs_mean"] == 0 for row in rows[1:])


@pytest.mark.parametrize("replay", ["none", "r2", "r3"])
def test_routes_of_the_sampler_are_those_of_the_trainer(replay, make_cell, completed):
    rows = completed(make_cell(device="cuda", steps=3, model="tiny_moe", replay=replay))
    assert all(row["expert_flip_frac"] < 0.01 for row in rows[1:])
    assert all(row["route_fallback_frac"] == 0 for row in rows[1:])
