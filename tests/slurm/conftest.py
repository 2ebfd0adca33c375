"""A throw-away Slurm cluster for the tests of this folder: `slurm/testcluster`, started once a session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stalefront import app

HERE = Path(__file__).parent
TESTCLUSTER = HERE.parents[1] / "slurm" / "testcluster"
MAX_ARRAY = 1001
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}


@dataclass(frozen=True)
class Cluster:
    """A running cluster; every command goes to it, whatever SLURM_CONF says."""

    conf: Path
    root: Path
    has_accounts: bool = False
    max_array: int = MAX_ARRAY
    nodes: tuple[str, ...] = ("n1", "n2")
    gpus_per_node: int = 2
    cpus_per_node: int = 8
    env: dict[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", clean_environment() | {"SLURM_CONF": str(self.conf)})

    def command(self, *words: object, timeout: float = 30) -> str:
        """Output of a Slurm command; raises with its error text if it fails."""
        ran = subprocess.run([str(w) for w in words], env=self.env, capture_output=True, text=True, timeout=timeout)
        if ran.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))}: exit {ran.returncode}\n{ran.stdout}{ran.stderr}")
        return ran.stdout

    def sbatch(self, *args: object) -> str:
        """Submit; the job id."""
        return self.command("sbatch", "--parsable", *args).strip()

    def squeue(self, *args: object) -> dict[str, str]:
        """State of each job that waits or runs; array tasks one by one, as `12_3`."""
        rows = self.command("squeue", "--noheader", "--array", "--format=%i %T", *args).splitlines()
        return dict(row.split() for row in rows)

    def scontrol(self, *args: object) -> str:
        return self.command("scontrol", *args)

    def scancel(self, *args: object) -> None:
        self.command("scancel", *args)

    def job(self, job_id: str) -> dict[str, str]:
        """Fields of `scontrol show job`: JobState, Restarts, NodeList, Reason and so on, ended jobs too."""
        words = self.scontrol("show", "job", "--oneliner", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job_id: str) -> str:
        return self.job(job_id)["JobState"]

    def wait(self, job_id: str, *states: str, seconds: float = 30) -> dict[str, str]:
        """Fields of the job once it is in one of the states; without any, once it has ended."""
        wanted = set(states) or ENDED
        return poll(lambda: (found := self.job(job_id))["JobState"] in wanted and found, seconds)

    def clear(self) -> None:
        """Cancel every job and wait until the nodes are empty."""
        self.scancel("--user=root")
        poll(lambda: not self.squeue())


def poll(condition: Callable[[], Any], seconds: float = 30) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not so within {seconds} s; last value {value!r}")
        time.sleep(0.05)
    return value


def clean_environment() -> dict[str, str]:
    """Without what a surrounding Slurm job sets: sbatch takes its options from there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}


def missing(*programs: str) -> list[str]:
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    return [program for program in programs if shutil.which(program, path=path) is None]


def needs_slurm() -> None:
    if os.geteuid() != 0 or missing("slurmctld", "slurmd", "munged", "sbatch"):
        pytest.skip("Slurm is not installed: apt-get install slurmctld slurmd slurm-client munge")


def run_script(*args: object, max_array: int = MAX_ARRAY) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    env = clean_environment() | {"TESTCLUSTER_MAX_ARRAY": str(max_array)}
    words = [str(TESTCLUSTER), *map(str, args)]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=180)


@contextmanager
def running_cluster(*, acct: bool = False, max_array: int = MAX_ARRAY) -> Iterator[Cluster]:
    """A cluster under a short path, as sockets need one; taken down whatever happens."""
    root = Path(tempfile.mkdtemp(prefix="sf-"))
    try:
        started = run_script("up", root, *(["--acct"] if acct else []), max_array=max_array)
        assert started.returncode == 0, started.stderr
        yield Cluster(root / "slurm.conf", root, has_accounts=acct, max_array=max_array)
    finally:
        ended = run_script("down", root)
        assert ended.returncode == 0, ended.stderr
        shutil.rmtree(root)


@contextmanager
def exported(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster as the one that commands without an own environment talk to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.conf))
        yield cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes, four fake GPUs, no sacct; SLURM_CONF points to it."""
    needs_slurm()
    with running_cluster() as running, exported(running):
        yield running


@pytest.fixture(scope="session")
def cluster_with_accounts() -> Iterator[Cluster]:
    """The same with slurmdbd, so that sacct answers; SLURM_CONF points to it."""
    needs_slurm()
    if lacking := missing("slurmdbd", "mariadbd"):
        pytest.skip(f"no {' and no '.join(lacking)}: apt-get install slurmdbd mariadb-server")
    with running_cluster(acct=True) as running, exported(running):
        yield running


@pytest.fixture(scope="session")
def testcluster() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`testcluster("up", folder)`: run the script; `max_array=` sets MaxArraySize."""
    needs_slurm()
    return run_script


@pytest.fixture(scope="session")
def testcluster_of() -> Callable[..., AbstractContextManager[Cluster]]:
    """`with testcluster_of(max_array=4) as small:` a cluster of its own, which commands talk to meanwhile."""
    needs_slurm()

    @contextmanager
    def own(**options: Any) -> Iterator[Cluster]:
        with running_cluster(**options) as running, exported(running):
            yield running

    return own


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., Any]:
    """`wait_until(condition, seconds=30)`: the first true value of `condition()`, or TimeoutError."""
    return poll


@pytest.fixture(autouse=True)
def _export_the_cluster_of_this_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both clusters live to the end of the session, and the one started last would keep SLURM_CONF."""
    names = [name for name in ("cluster", "cluster_with_accounts") if name in request.fixturenames]
    if len(names) != 1:
        yield
        return
    with exported(request.getfixturevalue(names[0])):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slurm)


# A cell of about a second after a warm-up of half a second.
SMALL = (
    *("steps=8", "model.warmup.steps=10", "model.warmup.batch_size=16", "validation.num_samples=16"),
    *("task.num_prompts=2", "task.num_generations=4"),
)
COMMAND = HERE.parents[1] / "sweep.py"


class SlurmSweep:
    """One sweep directory and the commands that are run on it, as jobs of the test cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.parent.mkdir(parents=True, exist_ok=True)

    def arguments(self, *arguments: str) -> list[str]:
        launcher = ("hydra/launcher=slurm", "slurm=cpu", "hydra.launcher.poll_s=1")
        return ["-m", "sweep=null", *SMALL, f"hydra.sweep.dir={self.root}", *launcher, *arguments]

    def run(self, *arguments: str) -> int:
        """In this process."""
        return app.run(self.arguments("hydra.launcher.report=false", *arguments))

    def run_local(self, *arguments: str) -> int:
        """The same cells by the local launcher."""
        where = f"hydra.sweep.dir={self.root}"
        return app.run(["-m", "sweep=null", *SMALL, where, "hydra.launcher.report=false", *arguments])

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """In a process of its own."""
        return subprocess.Popen(
            [sys.executable, str(COMMAND), *self.arguments(*arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.root.parent,
            start_new_session=True,
        )

    def jobs(self) -> list[Path]:
        """Folders of its submissions."""
        return sorted((self.root / "jobs").iterdir())


@pytest.fixture(scope="session")
def slurm_sweep() -> type[SlurmSweep]:
    return SlurmSweep
