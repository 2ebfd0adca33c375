"""What kills, cancels, requeues, preemption and time limits do to cells that run as jobs of a real Slurm."""

import json
import os
import signal
from contextlib import suppress

import pytest

from stalefront.files import read_json
from stalefront.observe import observe
from stalefront.paths import CellPaths, SweepPaths
from stalefront.record import WALL_CLOCK, read_rows
from stalefront.slurm.queue import ended, read_queue

# Long enough to be met at work, with a checkpoint every other step.
LONG = ("steps=120", "run.checkpoint_every=2")
SEEDS = "seed=0,1,2,3,4"


def numbers_of(folder):
    """Every recorded number of a cell but wall-clock ones, as text, so that NaN equals NaN."""
    return [
        json.dumps({k: v for k, v in row.items() if k not in WALL_CLOCK}) for row in read_rows(folder / "steps.jsonl")
    ]


def folders(root):
    """Folder of every planned cell by its seed."""
    plan = read_json(root / "plan.json") or {"cells": {}}
    return {entry["cell"]["seed"]: root / "cells" / cell_id for cell_id, entry in plan["cells"].items()}


def outcomes(root):
    return {seed: read_json(folder / "outcome.json") for seed, folder in folders(root).items()}


def has_begun(folder):
    """A cell that has a checkpoint behind it and a job."""
    seen = observe(CellPaths(folder))
    return bool(seen.live and seen.step >= 6 and seen.job)


def hold(sweep, count, wait_until):
    """Stop each of `count` cells once it has begun, so that none ends before what is to happen to it; their folders."""
    held = {}

    def all_held():
        for seed, folder in folders(sweep.root).items():
            if seed not in held and has_begun(folder):
                os.kill(claim(folder)["pid"], signal.SIGSTOP)
                held[seed] = folder
        return len(held) == count

    wait_until(all_held, 180)
    return [held[seed] for seed in sorted(held)]


def release(*cells):
    for folder in cells:
        with suppress(ProcessLookupError):
            os.kill(claim(folder)["pid"], signal.SIGCONT)


def is_stopping(sweep):
    """The job's pool has heard a signal."""
    return any("stopping: running cells" in log.read_text() for log in sweep.root.glob("jobs/*/*_log.out"))


def claim(folder, attempt=1):
    return read_json(folder / f"claim.{attempt}")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, slurm_sweep):
    """Records of cells that nothing happened to, by (steps, seed)."""
    root = tmp_path_factory.mktemp("untouched") / "sweep"
    sweep = slurm_sweep(root)
    assert sweep.run_local(*LONG, SEEDS) == 0
    return {seed: numbers_of(folder) for seed, folder in folders(root).items()}


def test_each_kind_of_death_and_stop(cluster, slurm_sweep, tmp_path, wait_until, untouched):
    sweep = slurm_sweep(tmp_path / "sweep")
    process = sweep.start(*LONG, SEEDS)
    killed, cancelled, requeued, usr2, term = cells = hold(sweep, 5, wait_until)
    os.kill(claim(killed)["pid"], signal.SIGKILL)
    cluster.scancel(claim(cancelled)["job"])
    cluster.scontrol("requeue", claim(requeued)["job"])
    cluster.scancel("--signal=USR2", claim(usr2)["job"])
    cluster.scancel("--signal=TERM", claim(term)["job"])
    release(*cells)
    out, _ = process.communicate(timeout=240)

    assert process.returncode == 1, out
    found = outcomes(sweep.root)
    assert [found[seed]["state"] for seed in range(5)] == ["failed", "failed", *["completed"] * 3], out
    assert "signal 9 (SIGKILL)" in found[0]["reason"]
    assert f"Slurm job {claim(cancelled)['job']}: CANCELLED" in found[1]["reason"]
    assert (sweep.root / "report.html").exists()
    for folder, seed in ((requeued, 2), (usr2, 3), (term, 4)):
        assert found[seed]["attempt"] == 2
        assert found[seed]["resumed_from_step"] > 0
        assert claim(folder, 2)["job"] == claim(folder, 1)["job"]
        assert claim(folder, 2)["restart"] == 1
        assert numbers_of(folder) == untouched[seed]

    assert sweep.run(*LONG, SEEDS) == 0
    healed = outcomes(sweep.root)
    assert {seed: one["attempt"] for seed, one in healed.items()} == dict.fromkeys(range(5), 2)
    assert {seed: numbers_of(folder) for seed, folder in folders(sweep.root).items()} == untouched
    assert read_json(cancelled / "attempts/1/outcome.json") == found[1]
    # Slurm itself calls a job with a failed cell FAILED.
    assert ended([claim(killed)["job"]])[claim(killed)["job"]].state == "FAILED"


def test_a_job_that_dies_as_a_whole_fails_all_its_cells_with_the_reason(cluster, slurm_sweep, tmp_path, wait_until):
    sweep = slurm_sweep(tmp_path / "sweep")
    process = sweep.start(*LONG, "seed=0,1,2", "hydra.launcher.cells_per_job=3")
    running = wait_until(lambda: [one for one in folders(sweep.root).values() if has_begun(one)], 120)
    # The pool's process, which the launcher id in the claim names, dies with everything it has started.
    pool = int(claim(running[0])["launcher"].split("/")[1])
    os.kill(pool, signal.SIGKILL)
    os.kill(claim(running[0])["pid"], signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1, out
    found = outcomes(sweep.root).values()
    assert [one["state"] for one in found] == ["failed"] * 3, out
    begun = next(one for one in found if one["last_step"])
    others = [one for one in found if one is not begun]
    job = claim(running[0])["job"]
    assert begun["reason"].startswith(f"Slurm job {job}: FAILED (exit ")
    assert all(one["reason"].startswith(f"Slurm job {job} ended before the cell began: FAILED") for one in others)
    assert sweep.run(*LONG, "seed=0,1,2", "hydra.launcher.cells_per_job=3", "hydra.launcher.width=3") == 0


@pytest.mark.slow
def test_preemption_and_the_time_limit(cluster, slurm_sweep, tmp_path, wait_until, untouched):
    """Both at once, since a time limit takes up to a minute; records equal those of cells that nothing happened to."""
    limited = slurm_sweep(tmp_path / "limited")
    in_limit = limited.start(*LONG, "seed=0", "slurm.time=1", "slurm.signal_delay_s=20", "slurm.nodelist=n1")
    preempted = slurm_sweep(tmp_path / "preempted")
    in_low = preempted.start(*LONG, "seed=1", "slurm.partition=low", "slurm.nodelist=n2")
    held = [*hold(preempted, 1, wait_until), *hold(limited, 1, wait_until)]
    high = cluster.sbatch("-p", "high", "-w", "n2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    wait_until(lambda: is_stopping(preempted), 60)
    release(held[0])
    wait_until(lambda: is_stopping(limited), 120)
    release(held[1])
    for process, sweep, seed in ((in_low, preempted, 1), (in_limit, limited, 0)):
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out
        outcome = outcomes(sweep.root)[seed]
        assert outcome["state"] == "completed"
        assert outcome["attempt"] >= 2
        assert outcome["resumed_from_step"] > 0
    assert cluster.state(high) == "COMPLETED"
    batch = next((limited.root / "jobs").iterdir())
    assert int((batch / "timeouts.0").read_text()) >= 1
    assert not list(next((preempted.root / "jobs").iterdir()).glob("timeouts.*"))
    for sweep, seed in ((limited, 0), (preempted, 1)):
        assert numbers_of(folders(sweep.root)[seed]) == untouched[seed]


def test_timeouts_are_retried_up_to_the_stated_count(cluster, slurm_sweep, tmp_path, wait_until):
    """A signal in a job whose limit is shorter than Slurm's precision counts as the limit."""
    sweep = slurm_sweep(tmp_path / "sweep")
    options = ("slurm.time=1", "slurm.signal_delay_s=20", "hydra.launcher.timeouts=0")
    process = sweep.start(*LONG, "seed=0", *options)
    (folder,) = hold(sweep, 1, wait_until)
    cluster.scancel("--signal=USR2", claim(folder)["job"])
    release(folder)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1, out
    outcome = read_json(folder / "outcome.json")
    assert outcome["state"] == "interrupted"
    assert "time limit of 1 min was reached 1 times (timeouts=0)" in outcome["reason"]
    assert sweep.run(*LONG, "seed=0") == 0


def test_the_queue_of_a_sweep_is_empty_when_its_launcher_ends(cluster, slurm_sweep, tmp_path):
    sweep = slurm_sweep(tmp_path / "sweep")
    assert sweep.run("seed=0") == 0
    names = {job.name for job in read_queue().jobs.values()}
    batches = [read_json(path) for path in SweepPaths(sweep.root).jobs.glob("*/batch.json")]
    assert all(batch["closed"] and batch["job_name"] not in names for batch in batches)


def test_a_lost_node_requeues_its_job(cluster, slurm_sweep, tmp_path, wait_until):
    sweep = slurm_sweep(tmp_path / "sweep")
    process = sweep.start(*LONG, "seed=0", "slurm.nodelist=n2")
    (folder,) = hold(sweep, 1, wait_until)
    cluster.scontrol("update", "nodename=n2", "state=down", "reason=test")
    try:
        wait_until(lambda: not observe(CellPaths(folder)).live, 60)
    finally:
        with suppress(RuntimeError):  # refused when the node has registered again by itself
            cluster.scontrol("update", "nodename=n2", "state=resume")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    outcome = read_json(folder / "outcome.json")
    assert (outcome["state"], outcome["attempt"]) == ("completed", 2)
    assert claim(folder, 2)["job"] == claim(folder, 1)["job"]
