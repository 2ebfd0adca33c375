"""Grids through `hydra/launcher=slurm`: submitting, packing, detaching, adopting, dry runs and long arrays."""

import os
import re
import signal
import subprocess
import time
from collections import Counter

from stalefront.files import read_json
from stalefront.observe import observe
from stalefront.paths import CellPaths, SweepPaths

GRID = ("delay.S=1,4", "optimizer.lr=1e-4,1e-3,1e-2")
ON_GPUS = "+slurm.sbatch.gres='gpu:1'"


def cells(root):
    plan = read_json(root / "plan.json") or {"cells": {}}
    return {cell_id: root / "cells" / cell_id for cell_id in plan["cells"]}


def states(root):
    return Counter(observe(CellPaths(folder)).state for folder in cells(root).values())


def attempts(root):
    return {cell_id: len(list(folder.glob("claim.*"))) for cell_id, folder in cells(root).items()}


def batches(root):
    return [read_json(path) for path in sorted(SweepPaths(root).jobs.glob("*/batch.json"))]


def ended(process, seconds=240):
    """Exit code and what was printed."""
    out, _ = process.communicate(timeout=seconds)
    return process.returncode, out


def job_logs(root):
    return [path.read_text() for path in sorted(root.glob("jobs/*/*_log.out"))]


def test_a_grid_runs_on_both_gpus_of_both_nodes_and_again_runs_nothing(cluster, slurm_sweep, tmp_path):
    sweep = slurm_sweep(tmp_path / "sweep")
    code, out = ended(sweep.start(*GRID, ON_GPUS))
    assert code == 0, out
    assert states(sweep.root) == {"completed": 6}
    assert (sweep.root / "report.html").exists()
    heads = [re.search(r"job (\S+), run 1, \S+, GPUs (\d+)\n", log) for log in job_logs(sweep.root)]
    nodes = [cluster.job(head.group(1))["NodeList"] for head in heads]
    used = {(node, head.group(2)) for node, head in zip(nodes, heads, strict=True)}
    assert used == {("n1", "0"), ("n1", "1"), ("n2", "0"), ("n2", "1")}

    code, out = ended(sweep.start(*GRID, ON_GPUS))
    assert code == 0
    assert "6 finished before, 0 to run" in out
    assert len(batches(sweep.root)) == 1

    outcome = read_json(next(iter(cells(sweep.root).values())) / "outcome.json")
    (batch,) = batches(sweep.root)
    assert outcome["job"].partition("_")[0] == batch["job"]
    assert (outcome["commit"], outcome["dirty"]) == (batch["code"]["commit"], batch["code"]["dirty"])


def test_jobs_run_the_code_as_it_was_at_submission(cluster, slurm_sweep, tmp_path):
    """The frozen tree is what a job imports: a mark left in it shows in the job's log."""
    sweep = slurm_sweep(tmp_path / "sweep")
    cluster.scontrol("update", "partition=gpu", "state=down")
    try:
        code, out = ended(sweep.start("seed=0", "hydra.launcher.wait=false", "hydra.launcher.report=false"))
        assert code == 0, out
        frozen = next((sweep.root / "code").iterdir())
        job = frozen / "stalefront" / "slurm" / "job.py"
        job.write_text(job.read_text().replace("cells to run", "cells to run from the frozen tree"))
    finally:
        cluster.scontrol("update", "partition=gpu", "state=up")
    (batch,) = batches(sweep.root)
    cluster.wait(batch["job"], seconds=120)
    assert states(sweep.root) == {"completed": 1}
    assert "from the frozen tree" in job_logs(sweep.root)[0]


def test_detached_it_returns_and_the_report_job_comes_last(cluster, slurm_sweep, tmp_path):
    sweep = slurm_sweep(tmp_path / "sweep")
    detached = (*GRID, "hydra.launcher.wait=false", "hydra.launcher.cells_per_job=3", "hydra.launcher.width=2")
    code, out = ended(sweep.start(*detached), 60)
    assert code == 0, out
    assert "stalefront status" in out
    (batch,) = batches(sweep.root)
    assert len(batch["cells"]) == 2
    assert cluster.state(batch["report_job"]) in ("PENDING", "RUNNING")

    # The same again, and with one more cell: only that is submitted, and the report waits for it too.
    code, out = ended(sweep.start(*detached, "optimizer.lr=1e-4,1e-3,1e-2,2e-2", "delay.S=4"), 60)
    assert code == 0, out
    assert "3 cells are in the queue or running already" in out or "0 finished before" not in out
    newest = batches(sweep.root)[-1]
    assert sum(map(len, newest["cells"])) == 1
    assert cluster.state(batch["report_job"]) == "CANCELLED"
    cluster.wait(newest["report_job"], "COMPLETED", seconds=240)
    assert states(sweep.root) == {"completed": 7}
    assert set(attempts(sweep.root).values()) == {1}
    assert (sweep.root / "report.html").exists()
    assert all(one["closed"] for one in batches(sweep.root))


def test_cells_packed_into_a_job_run_side_by_side(cluster, slurm_sweep, tmp_path):
    sweep = slurm_sweep(tmp_path / "sweep")
    packed = ("seed=0,1,2", "steps=60", "hydra.launcher.cells_per_job=3", "hydra.launcher.width=3")
    assert sweep.run(*packed) == 0
    claims = [read_json(folder / "claim.1") for folder in cells(sweep.root).values()]
    assert len({claim["job"] for claim in claims}) == 1
    spans = [read_json(folder / "outcome.json") for folder in cells(sweep.root).values()]
    assert max(one["started_utc"] for one in spans) <= min(one["finished_utc"] for one in spans)
    assert cluster.job(claims[0]["job"])["NumCPUs"] == "3"


def test_a_dry_run_leaves_scripts_that_plain_sbatch_runs(cluster, slurm_sweep, tmp_path):
    sweep = slurm_sweep(tmp_path / "sweep")
    code, out = ended(sweep.start(*GRID, "hydra.launcher.dry_run=true", "hydra.launcher.cells_per_job=2"))
    assert code == 0, out
    scripts = re.findall(r"sbatch (\S+job\.sbatch)", out)
    assert len(scripts) == 1
    assert states(sweep.root) == {"planned": 6}
    assert not list(sweep.root.rglob("*.pkl"))
    job = cluster.sbatch(scripts[0])
    for index in range(3):
        assert cluster.wait(f"{job}_{index}", seconds=120)["JobState"] == "COMPLETED"
    assert states(sweep.root) == {"completed": 6}
    assert not list(sweep.root.rglob("*.pkl"))
    (batch,) = batches(sweep.root)
    assert batch["job"] == job
    assert sweep.run(*GRID) == 0
    assert set(attempts(sweep.root).values()) == {1}


def test_jobs_of_a_dry_run_in_the_queue_are_adopted(cluster, slurm_sweep, tmp_path):
    sweep = slurm_sweep(tmp_path / "sweep")
    code, out = ended(sweep.start("seed=0,1", "hydra.launcher.dry_run=true"))
    cluster.sbatch(re.search(r"sbatch (\S+job\.sbatch)", out).group(1))
    code, out = ended(sweep.start("seed=0,1"))
    assert code == 0, out
    assert "2 cells are in the queue or running already" in out
    assert set(attempts(sweep.root).values()) == {1}
    assert len(batches(sweep.root)) == 1


def test_a_killed_launcher_is_taken_over_without_doubling_a_cell(cluster, slurm_sweep, tmp_path, wait_until):
    sweep = slurm_sweep(tmp_path / "sweep")
    process = sweep.start("seed=0,1,2", "steps=60")
    wait_until(lambda: any(observe(CellPaths(folder)).live for folder in cells(sweep.root).values()), 120)
    process.kill()
    process.communicate()
    code, out = ended(sweep.start("seed=0,1,2", "steps=60"))
    assert code == 0, out
    assert len(batches(sweep.root)) == 1
    assert set(attempts(sweep.root).values()) == {1}
    assert states(sweep.root) == {"completed": 3}


def test_a_launcher_killed_before_it_knew_the_number_is_taken_over(cluster, slurm_sweep, tmp_path):
    sweep = slurm_sweep(tmp_path / "sweep")
    cluster.scontrol("update", "partition=gpu", "state=down")
    try:
        ended(sweep.start("seed=0,1", "hydra.launcher.wait=false", "hydra.launcher.report=false"))
        path = next(SweepPaths(sweep.root).jobs.glob("*/batch.json"))
        path.write_text(path.read_text().replace(f'"job": "{read_json(path)["job"]}"', '"job": null'))
        process = sweep.start("seed=0,1")
        time.sleep(1)
    finally:
        cluster.scontrol("update", "partition=gpu", "state=up")
    code, out = ended(process)
    assert code == 0, out
    assert "2 cells are in the queue or running already" in out
    assert set(attempts(sweep.root).values()) == {1}


def test_two_launchers_at_once_submit_every_cell_once(cluster, slurm_sweep, tmp_path):
    sweep = slurm_sweep(tmp_path / "sweep")
    both = [sweep.start(*GRID, "hydra.launcher.cells_per_job=3") for _ in range(2)]
    for process in both:
        code, out = ended(process)
        assert code == 0, out
    assert states(sweep.root) == {"completed": 6}
    assert set(attempts(sweep.root).values()) == {1}
    assert sum(len(job) for batch in batches(sweep.root) for job in batch["cells"]) == 6


def test_ctrl_c_leaves_the_jobs_alone_and_says_how_to_come_back(cluster, slurm_sweep, tmp_path, wait_until):
    sweep = slurm_sweep(tmp_path / "sweep")
    process = sweep.start("seed=0,1", "steps=60")
    wait_until(lambda: any(observe(CellPaths(folder)).live for folder in cells(sweep.root).values()), 120)
    os.killpg(process.pid, signal.SIGINT)
    code, out = ended(process, 30)
    assert code == 128 + signal.SIGINT
    assert "The jobs go on" in out
    assert "stalefront cancel" in out
    code, out = ended(sweep.start("seed=0,1", "steps=60"))
    assert code == 0, out
    assert set(attempts(sweep.root).values()) == {1}


def test_arrays_are_split_at_the_clusters_limit_and_share_the_throttle(testcluster_of, slurm_sweep, tmp_path):
    with testcluster_of(max_array=4) as small:
        sweep = slurm_sweep(tmp_path / "sweep")
        options = ("seed=range(0,10)", "hydra.launcher.throttle=4", "hydra.launcher.wait=false")
        code, out = ended(sweep.start(*options, "hydra.launcher.report=false", "steps=1"))
        assert code == 0, out
        assert [len(batch["cells"]) for batch in batches(sweep.root)] == [4, 4, 2]
        throttles = [small.job(f"{batch['job']}").get("ArrayTaskThrottle") for batch in batches(sweep.root)]
        assert throttles == ["2", "1", "1"]
        small.scancel("--user=root")


def test_a_thousand_cells_in_a_dry_run(cluster, slurm_sweep, tmp_path):
    sweep = slurm_sweep(tmp_path / "sweep")
    grid = ("seed=range(0,1000)", "hydra.launcher.dry_run=true", "hydra.launcher.cells_per_job=4")
    code, out = ended(sweep.start(*grid))
    assert code == 0, out
    (batch,) = batches(sweep.root)
    assert [len(job) for job in batch["cells"]] == [4] * 250
    script = (sweep.jobs()[0] / "job.sbatch").read_text()
    assert "#SBATCH --array=0-249%250" in script
    # Slurm itself finds nothing wrong with it.
    subprocess.run(["sbatch", "--test-only", str(sweep.jobs()[0] / "job.sbatch")], check=True, capture_output=True)


def test_with_accounting(cluster_with_accounts, slurm_sweep, tmp_path, wait_until):
    sweep = slurm_sweep(tmp_path / "sweep")
    process = sweep.start("seed=0,1", "steps=60")
    folders = wait_until(
        lambda: [f for f in cells(sweep.root).values() if observe(CellPaths(f)).live and observe(CellPaths(f)).job], 120
    )
    job = observe(CellPaths(folders[0])).job
    cluster_with_accounts.scancel(job)
    code, out = ended(process)
    assert code == 1, out
    assert states(sweep.root) == {"completed": 1, "failed": 1}
    assert f"Slurm job {job}" in read_json(folders[0] / "outcome.json")["reason"]
    assert sweep.run("seed=0,1", "steps=60") == 0


def test_a_refused_submission_says_why_and_keeps_the_cells_planned(cluster, slurm_sweep, tmp_path):
    sweep = slurm_sweep(tmp_path / "sweep")
    code, out = ended(sweep.start("seed=0,1", "slurm.partition=nowhere"))
    assert code == 1, out
    assert "invalid partition" in out.lower()
    assert states(sweep.root) == {"planned": 2}
    assert sweep.run("seed=0,1") == 0


def test_a_cell_of_two_ranks_runs_on_two_nodes_and_survives_a_signal(cluster, slurm_sweep, tmp_path, wait_until):
    sweep = slurm_sweep(tmp_path / "sweep")
    process = sweep.start("seed=0", "model.ranks=2", "slurm.nodes=2", "steps=120", "run.checkpoint_every=2")
    (folder,) = wait_until(
        lambda: [f for f in cells(sweep.root).values() if (seen := observe(CellPaths(f))).live and seen.step >= 6], 180
    )
    job = observe(CellPaths(folder)).job
    assert cluster.job(job)["NumNodes"] == "2"
    cluster.scancel("--signal=USR2", job)
    code, out = ended(process)
    assert code == 0, out
    outcome = read_json(folder / "outcome.json")
    assert (outcome["state"], outcome["attempt"], outcome["last_step"]) == ("completed", 2, 120)
    assert outcome["resumed_from_step"] > 0
