"""A cell of two ranks on two nodes: one torchrun a node through srun, gloo between them."""

import os
import signal
import sys
import time

import pytest

from stalefront.files import read_json, write_json
from stalefront.paths import CellPaths
from stalefront.record import read_rows

pytestmark = pytest.mark.slurm

WORK = """
from pathlib import Path
from stalefront.worker import Order, work
work(Order(Path({root!r}), {attempt}, False, "test", 1, None))
"""


@pytest.fixture
def submit(cluster, make_cell, cache_dir, tmp_path):
    """`submit(attempt=1, steps=6)`: the job of a cell of two ranks in an allocation of two nodes, and its files."""

    def start(attempt=1, **overrides):
        cell = make_cell(**{"model.warmup.steps": 20, "model.ranks": 2}, **overrides)
        paths = CellPaths(tmp_path / "cell")
        run = {"checkpoint_every": 1000, "cache_dir": str(cache_dir), "keep_checkpoint": True}
        write_json(paths.config, {"cell_id": cell.cell_id, "cell": cell.as_dict(), "run": run})
        script = tmp_path / "work.py"
        script.write_text(WORK.format(root=str(paths.root), attempt=attempt))
        wrapped = f"exec {sys.executable} {script}"
        options = ("--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/job.txt")
        return cluster.sbatch(*options, f"--wrap={wrapped}"), paths

    yield start
    cluster.clear()


def test_one_rank_a_node(cluster, submit):
    job, paths = submit(steps=6)
    ended = cluster.wait(job, seconds=120)
    log = paths.log.read_text()
    assert ended["JobState"] == "COMPLETED", log
    outcome = read_json(paths.outcome)
    assert (outcome["state"], outcome["last_step"]) == ("completed", 6), log
    assert [row["step"] for row in read_rows(paths.steps)] == list(range(7))


def test_a_signal_to_every_process_of_the_job_ends_it_in_order(cluster, submit, wait_until):
    job, paths = submit(steps=400)
    wait_until(lambda: paths.steps.exists() and paths.steps.read_bytes().count(b"\n") > 5, 120)
    cluster.scancel("--signal=USR2", "--full", job)
    cluster.wait(job, seconds=60)
    outcome = read_json(paths.outcome)
    assert outcome["state"] == "interrupted", paths.log.read_text()
    assert outcome["last_step"] == [row["step"] for row in read_rows(paths.steps)][-1]
    job, _ = submit(attempt=2, steps=400)
    wait_until(lambda: read_json(paths.status)["attempt"] == 2 and read_json(paths.status)["step"] > 0, 120)
    cluster.scancel("--signal=TERM", "--full", job)
    cluster.wait(job, seconds=60)
    again = read_json(paths.outcome)
    assert (again["state"], again["resumed_from_step"]) == ("interrupted", outcome["last_step"]), paths.log.read_text()


def test_a_killed_rank_ends_those_on_other_nodes(cluster, submit, wait_until):
    job, paths = submit(steps=400)
    wait_until(lambda: paths.steps.exists() and paths.steps.read_bytes().count(b"\n") > 5, 120)
    os.kill(read_json(paths.status)["pid"], signal.SIGKILL)  # both nodes are on this machine
    began = time.monotonic()
    assert cluster.wait(job, seconds=60)["JobState"] == "FAILED"
    print(f"the job ended {time.monotonic() - began:.1f} s after its rank")
    assert read_json(paths.outcome)["state"] == "failed"
    assert "another rank ended early" in read_json(paths.outcome)["reason"]
