"""`slurm/testcluster`: what tests of the launcher rely on, and that it ends all it started."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm


@pytest.fixture
def folder(testcluster) -> Iterator[Path]:
    """A short path; tmp_path can be too long for the sockets. Nothing may run there after the test."""
    with tempfile.TemporaryDirectory(prefix="sf-") as name:
        yield Path(name)
        testcluster("down", name)
        for child in Path(name).iterdir():
            testcluster("down", child)


@pytest.fixture
def empty(cluster) -> Iterator[None]:
    """No job before or after: what runs of one test would delay the next."""
    cluster.clear()
    yield
    cluster.clear()


def in_cluster(root: Path) -> list[str]:
    """Living processes that have the folder in their command line or environment, but for those of this session."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:  # Ended meanwhile.
            continue
        if str(root).encode() in text and int(process.name) != os.getpid():
            found.append(f"{process.name} {text[:60]!r}")
    return found


def sinfo(root: Path) -> str:
    command = ["sinfo", "--noheader", "--partition=gpu", "--states=idle", "--format=%D"]
    return subprocess.run(
        command, env={**os.environ, "SLURM_CONF": f"{root}/slurm.conf"}, text=True, stdout=subprocess.PIPE
    ).stdout


def test_up_and_down_twice(testcluster, folder):
    root = folder / "cluster"
    for _ in range(2):
        start = time.monotonic()
        up = testcluster("up", root)
        up_seconds, start = time.monotonic() - start, time.monotonic()
        assert (up.returncode, up.stdout) == (0, f"export SLURM_CONF={root}/slurm.conf\n"), up.stderr
        assert sinfo(root).strip() == "2"
        start = time.monotonic()
        assert testcluster("down", root).returncode == 0
        # Loose, for a busy machine: 0.2 s each on an idle one.
        assert max(up_seconds, time.monotonic() - start) < 5
        assert in_cluster(root) == []
    assert sorted(path.name for path in root.iterdir()) == ["cluster", "gres.conf", "log", "slurm.conf"]


def test_a_second_up_is_refused_and_a_second_down_is_not(testcluster, folder):
    root = folder / "cluster"
    assert testcluster("up", root).returncode == 0
    again = testcluster("up", root)
    assert (again.returncode, again.stdout) == (2, "")
    assert "holds a running cluster" in again.stderr
    assert sinfo(root).strip() == "2"
    assert testcluster("down", root).returncode == 0
    for _ in range(2):
        down = testcluster("down", root)
        assert down.returncode == 0
        assert "nothing runs" in down.stderr


def test_clusters_started_at_the_same_moment(testcluster, folder):
    roots = [folder / name for name in "abc"]
    with ThreadPoolExecutor(len(roots)) as pool:
        assert [up.returncode for up in pool.map(lambda root: testcluster("up", root), roots)] == [0, 0, 0]
    assert testcluster("down", roots[0]).returncode == 0
    assert in_cluster(roots[0]) == []
    assert [sinfo(root).strip() for root in roots[1:]] == ["2", "2"]


def test_a_long_path_gets_its_sockets_elsewhere(testcluster, folder):
    root = folder / ("d" * 120)
    assert testcluster("up", root).returncode == 0
    assert sinfo(root).strip() == "2"
    sockets = Path((root / "cluster").read_text().split()[1])
    assert sockets.is_dir()
    assert testcluster("down", root).returncode == 0
    assert not sockets.exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "usage"),
        (["up"], "usage"),
        (["up", "--acct"], "usage"),
        (["up", "cluster", "--account"], "usage"),
        (["restart", "cluster"], "usage"),
        (["up", "a b"], "cannot take the path"),
        (["up", "."], "holds other files"),
    ],
)
def test_bad_calls_start_nothing(testcluster, folder, monkeypatch, words, text):
    monkeypatch.chdir(folder)
    (folder / "mine").mkdir()
    ran = testcluster(*words)
    assert ran.returncode == 2
    assert text in ran.stderr
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_a_failed_start_ends_what_it_started_and_names_the_log(testcluster, folder, monkeypatch):
    broken = folder / "bin" / "slurmd"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho out of order\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    root = folder / "cluster"
    up = testcluster("up", root)
    assert (up.returncode, up.stdout) == (1, "")
    assert "ended before it was ready" in up.stderr
    assert f"{root}/log/n" in up.stderr
    assert in_cluster(root) == []


def test_down_ends_jobs_and_what_they_left_behind(testcluster, folder, wait_until):
    root = folder / "cluster"
    assert testcluster("up", root).returncode == 0
    env = {**os.environ, "SLURM_CONF": f"{root}/slurm.conf"}
    # One process in a session of its own, one without environment, one step, and a trap for SIGTERM.
    script = f"""trap '' TERM
setsid sleep 600 &
env -i sleep 600 {root} &
srun sleep 600 &
while sleep 1; do touch {root}/log/beat; done"""
    subprocess.run(["sbatch", "-o", "/dev/null", "--wrap", script], env=env, check=True, stdout=subprocess.DEVNULL)
    wait_until((root / "log" / "beat").exists)
    assert len(in_cluster(root)) > 4
    # This one has SLURM_CONF as any user of the cluster, and is not ours to end.
    with subprocess.Popen(["sleep", "600"], env=env) as bystander:
        start = time.monotonic()
        assert testcluster("down", root).returncode == 0
        assert time.monotonic() - start < 5
        assert bystander.poll() is None
        bystander.kill()
    assert in_cluster(root) == []


def test_nodes(cluster):
    assert cluster.command("sinfo", "-h", "-p", "gpu", "-N", "-o", "%N %t %c %G").split("\n")[:2] == [
        "n1 idle 8 gpu:2",
        "n2 idle 8 gpu:2",
    ]
    assert os.environ["SLURM_CONF"] == str(cluster.conf)


def test_jobs_see_different_gpus(cluster, empty, tmp_path, wait_until):
    script = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $(srun printenv CUDA_VISIBLE_DEVICES); sleep 600"
    jobs = [cluster.sbatch("-G1", "-o", tmp_path / "%j", "--wrap", script) for _ in range(5)]
    for job in jobs[:4]:
        cluster.wait(job, "RUNNING")
    outputs = [tmp_path / job for job in jobs[:4]]
    wait_until(lambda: all(path.exists() and path.read_text().endswith("\n") for path in outputs))
    assert sorted(path.read_text() for path in outputs) == ["n1 0 0\n", "n1 1 1\n", "n2 0 0\n", "n2 1 1\n"]
    # No GPU is left for the fifth.
    assert cluster.state(jobs[4]) == "PENDING"


def test_memory_limits_how_many_jobs_fit(cluster, empty):
    jobs = [cluster.sbatch("-w", "n1", "--mem=30000", "-o", "/dev/null", "--wrap", "sleep 600") for _ in range(3)]
    for job in jobs[:2]:
        cluster.wait(job, "RUNNING")
    time.sleep(1.5)
    assert cluster.squeue() == dict(zip(jobs, ["RUNNING", "RUNNING", "PENDING"], strict=True))


def test_a_requeued_job_starts_again_soon(cluster, empty):
    job = cluster.sbatch("-o", "/dev/null", "--wrap", "sleep 600")
    cluster.wait(job, "RUNNING")
    cluster.scontrol("requeue", job)
    fields = cluster.wait(job, "RUNNING", seconds=15)
    assert fields["Restarts"] == "1"


def test_a_job_of_low_gives_way_to_one_of_high(cluster, empty, tmp_path):
    script = f"trap 'touch {tmp_path}/warned' USR2; while sleep 0.2; do :; done"
    low = cluster.sbatch("-p", "low", "-N2", "-G4", "--signal=B:USR2@60", "-o", "/dev/null", "--wrap", script)
    cluster.wait(low, "RUNNING")
    high = cluster.sbatch("-p", "high", "-N2", "-G4", "-o", "/dev/null", "--wrap", "sleep 600")
    cluster.wait(high, "RUNNING")
    assert (tmp_path / "warned").exists()
    assert cluster.wait(low, "PENDING")["Restarts"] == "1"


def test_arrays_up_to_the_limit(cluster, empty):
    with pytest.raises(RuntimeError, match="Invalid job array specification"):
        cluster.sbatch("-H", f"--array=0-{cluster.max_array}", "-o", "/dev/null", "--wrap", "true")
    job = cluster.sbatch("-H", f"--array=0-{cluster.max_array - 1}", "-o", "/dev/null", "--wrap", "true")
    assert cluster.squeue()[f"{job}_{cluster.max_array - 1}"] == "PENDING"


def test_sacct_answers(cluster_with_accounts, wait_until):
    job = cluster_with_accounts.sbatch("-o", "/dev/null", "--wrap", "true")
    words = ("sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State", "--jobs", job)
    wait_until(lambda: cluster_with_accounts.command(*words) == f"{job}|COMPLETED\n")
    assert os.environ["SLURM_CONF"] == str(cluster_with_accounts.conf)
