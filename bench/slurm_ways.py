"""What `bench/slurm.py` compares and where: a throw-away cluster, and one command line for each of two launchers.

Ours is `sweep.py` with `hydra/launcher=slurm`; theirs is `hydra_app.py` with hydra-submitit-launcher, which is
installed for the benchmark alone, into a folder that only their command has on its path.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT

from stalefront.files import read_json

THEIR_PACKAGE = "hydra-submitit-launcher==1.2.0"
# The cell of tests/slurm: about a second after a warm-up of half a second, so that launching is what is measured.
SMALL = (
    *("steps=8", "model.warmup.steps=10", "model.warmup.batch_size=16", "validation.num_samples=16"),
    *("task.num_prompts=2", "task.num_generations=4"),
)
# Their log tells of every attempt to ask sacct where there is none; that is no word about a cell.
WORD = re.compile(r"fail|error|exception|interrupt|cancel|killed", re.IGNORECASE)
NO_WORD = re.compile(r"sacct|^\s*File |Set the environment variable")


@dataclass(frozen=True)
class Cluster:
    """A cluster of `slurm/testcluster`."""

    root: Path
    env: dict[str, str] = field(repr=False)

    def command(self, *words: object) -> str:
        """What a Slurm command prints; raises where it fails."""
        done = subprocess.run([*map(str, words)], env=self.env, capture_output=True, text=True, check=True)
        return done.stdout

    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self.command("squeue", "-h", "-r", "-o", "%i").splitlines())

    def job(self, job: str) -> dict[str, str]:
        """Fields of a job, ended ones too."""
        words = self.command("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def clear(self) -> None:
        """Cancel what there is."""
        self.command("scancel", "--user=root")
        until(lambda: not self.waiting(), 60)


@contextmanager
def cluster(*, accounts: bool) -> Iterator[Cluster]:
    """A cluster under a short path, as sockets need one; taken down whatever happens."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "SRUN"))}
    script = str(ROOT / "slurm" / "testcluster")
    with tempfile.TemporaryDirectory(prefix="sb-") as folder:
        try:
            up = [script, "up", folder, *(["--acct"] if accounts else [])]
            subprocess.run(up, env=plain, check=True, stdout=subprocess.DEVNULL)
            # One thread a process for both: a numpy that takes both cores would be measured too.
            yield Cluster(Path(folder), plain | {"SLURM_CONF": f"{folder}/slurm.conf", "OMP_NUM_THREADS": "1"})
        finally:
            subprocess.run([script, "down", folder], env=plain, check=True)


def until(condition: Callable[[], Any], seconds: float) -> Any:
    """The first true value of `condition`, or its last value when the time is over."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return value


class Launch:
    """A launcher's process, with the time of every line it prints."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self.began = time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            command,
            env=env,
            cwd=ROOT / "bench",
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait(self, seconds: float) -> int | None:
        """Exit code; None when it still runs after that time."""
        try:
            code = self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5)
        return code

    def signal(self, number: int) -> None:
        """Send a signal as a terminal does, to the whole group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """End it."""
        self.signal(signal.SIGKILL)
        self.wait(10)

    def word(self, since: float) -> tuple[float, str] | None:
        """Seconds after `since` of the first line about something that went wrong, and that line."""
        for at, line in list(self.lines):
            if at >= since and WORD.search(line) and not NO_WORD.search(line):
                return at - since, line.strip()
        return None


@dataclass(frozen=True)
class Way:
    """A launcher.

    Attributes
    ----------
    command : sequence of str
        Up to the overrides of a sweep.
    cells : str
        Pattern of the folders of cells.
    job_setup : str
        Key of the shell lines that a job begins with.
    """

    name: str
    command: Sequence[str]
    cells: str
    job_setup: str
    path: str = ""

    def start(self, where: Cluster, folder: Path, *overrides: str) -> Launch:
        """Start a sweep in `folder`."""
        env = where.env | ({"PYTHONPATH": self.path} if self.path else {})
        return Launch([*self.command, *SMALL, f"hydra.sweep.dir={folder}", *overrides], env)

    def found(self, folder: Path) -> list[Path]:
        """Folders of cells that somebody has begun or planned."""
        return sorted(path.parent for path in folder.glob(f"{self.cells}/config.json"))

    def completed(self, folder: Path) -> int:
        """Cells that have completed."""
        return sum((read_json(cell / "outcome.json") or {}).get("state") == "completed" for cell in self.found(folder))

    def starts(self, cell: Path) -> int:
        """How often the cell was begun."""
        noted = cell / "starts"
        return len(noted.read_text().split()) if noted.exists() else len(list(cell.glob("claim.*")))


def our_way(*options: str, name: str = "ours") -> Way:
    """Our launcher at its defaults, without the report, which theirs has none of."""
    launcher = ("-m", "sweep=null", "hydra/launcher=slurm", "slurm=cpu", "hydra.launcher.report=false", *options)
    return Way(name, [sys.executable, str(ROOT / "sweep.py"), *launcher], "cells/*", "slurm.setup")


def their_way(target: Path) -> Way | None:
    """Their launcher at its defaults, installed into `target`; None, and why, where that does not work."""
    # `--no-deps`: hydra-core and submitit are those of this project, so that both launchers use the same.
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), THEIR_PACKAGE]
    print(f"installing {THEIR_PACKAGE} into {target} for this benchmark alone", flush=True)
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"it cannot be installed, so that ours is measured alone:\n{done.stderr.strip()}", flush=True)
        return None
    launcher = (
        *("-m", "~sweep", "~slurm", "hydra/launcher=submitit_slurm", "hydra/sweeper=basic"),
        *("hydra/job_logging=default", "hydra/hydra_logging=default", "hydra.sweep.subdir=${hydra.job.num}"),
    )
    command = [sys.executable, str(ROOT / "bench" / "hydra_app.py"), *launcher]
    return Way("theirs", command, "[0-9]*", "hydra.launcher.setup", str(target))
