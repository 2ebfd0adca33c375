"""A cell of several ranks: its process starts torchrun, passes on requests to stop, and waits.

The ranks run the loop of `stalefront.loop` and are started by torchrun alone: once on this machine, or once a node
through `srun` inside a Slurm allocation of several nodes. `accelerate launch` is not used: it would start torchrun too.

A request to stop is a file, so that it reaches ranks on every node; the first rank looks for it after each learner
step. torchrun itself hears no signal a job is asked to end with: it would kill its ranks 30 s after the first one.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalefront.choice import OptionError
from stalefront.claims import last_attempt
from stalefront.files import read_json
from stalefront.paths import CellPaths
from stalefront.tether import die_with_parent

# Seconds that ranks have to write down how they end after one of them has failed.
SHUTDOWN_S = 5
# torchrun reads its options from PET_* too; a version that does not know one passes over it. SIGQUIT stands for none.
QUIET = {"PET_SIGNALS_TO_HANDLE": "SIGQUIT", "PET_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S), "PYTHONSAFEPATH": "1"}


@dataclass(frozen=True)
class Place:
    """Where ranks run.

    Attributes
    ----------
    nodes : int
        Machines.
    endpoint : str
        Address at which the ranks meet.
    """

    nodes: int
    endpoint: str

    @classmethod
    def here(cls) -> Place:
        """This machine, or the nodes of the Slurm allocation it belongs to."""
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
        if nodes == 1:
            return cls(1, "localhost:0")  # any free port
        first, *_ = _scontrol("hostnames", os.environ["SLURM_JOB_NODELIST"])
        # The address that the nodes themselves talk to one another by; most often the name.
        address = next(word for word in _scontrol("node", first) if word.startswith("NodeAddr="))
        return cls(nodes, f"{address.partition('=')[2]}:{free_port()}")

    def command(self, root: Path, attempt: int, ranks: int) -> list[str]:
        """What to start: torchrun, or srun that starts it on every node."""
        if ranks % self.nodes:
            legal = f"a multiple of {self.nodes}, the nodes of this allocation"
            raise OptionError("model.ranks", ranks, legal, "Every node runs as many ranks.")
        tether = [sys.executable, "-m", "stalefront.tether"]
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run"),
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={ranks // self.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={root.name}-{attempt}",
            "--max-restarts=0",
            *(("--local-addr=localhost",) if self.nodes == 1 else ()),
            *("-m", "stalefront.ranked", str(root), str(attempt)),
        ]
        if self.nodes == 1:
            return [*tether, "--tied", *torchrun]
        one_each = (f"--nodes={self.nodes}", f"--ntasks={self.nodes}", "--ntasks-per-node=1")
        # All cores of a node are for its one task; when a node fails, the others end with it. The tasks are Slurm's: a
        # tie to whatever of it starts them could end them early.
        srun = ["srun", "--overlap", "--mem=0", *one_each, "--cpu-bind=none", "--kill-on-bad-exit=1"]
        return [*tether, "--tied", *srun, *tether, *torchrun]


def _scontrol(*words: str) -> list[str]:
    """Words of what `scontrol show` tells."""
    return subprocess.run(["scontrol", "show", *words], capture_output=True, text=True, check=True).stdout.split()


def free_port() -> int:
    """A port that is free on this machine, which in an allocation is its first node."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def ranks_of(paths: CellPaths) -> int:
    """Ranks of the cell recorded in a directory; 1 for one recorded before there were any."""
    config = read_json(paths.config)
    return int(config["cell"]["model"].get("ranks", 1))


def run_ranks(paths: CellPaths, attempt: int) -> str | None:
    """Run the ranks of a cell to their end; returns the state of its outcome, None where none was written."""
    command = Place.here().command(paths.root.absolute(), attempt, ranks_of(paths))
    # Modules are found as in this process, wherever torchrun starts from.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    with _stops_passed_on(paths.stop(attempt)):
        subprocess.run(command, env={**os.environ, **QUIET, "PYTHONPATH": path}, start_new_session=True, check=False)
    outcome = read_json(paths.outcome) or {}
    return str(outcome["state"]) if outcome.get("attempt") == attempt else None


@contextmanager
def _stops_passed_on(stop: Path) -> Iterator[None]:
    """Turn SIGTERM and SIGUSR2 to this process into the file that ranks look for."""

    def ask(*_: object) -> None:
        stop.touch()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGUSR2)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.unlink(missing_ok=True)


def main(root: Path, attempt: int) -> int:
    """Entry point of a rank: its exit code tells torchrun whether to end the others."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    paths = CellPaths(root)

    def asked() -> bool:
        # Out of reach of whoever started it, this attempt may have been given up: it must not write any more.
        if last_attempt(paths) > attempt:
            print("another attempt has begun: this one ends", file=sys.stderr, flush=True)
            os._exit(1)
        return paths.stop(attempt).exists()

    return 0 if _run_rank(paths, attempt, asked)["state"] != "failed" else 1


def _run_rank(paths: CellPaths, attempt: int, asked: Callable[[], bool]) -> dict[str, Any]:
    from torch import distributed

    from stalefront.ranks import Ranks
    from stalefront.run import run_cell

    ranks = Ranks.from_environment(str(read_json(paths.config)["cell"]["device"]))
    outcome = run_cell(paths.root, attempt=attempt, ranks=ranks, asked=asked)
    if outcome["error"]:
        print(f"rank {ranks.rank}: {outcome['error']}", file=sys.stderr, flush=True)
    else:
        distributed.destroy_process_group()
    return outcome


if __name__ == "__main__":
    try:
        code = main(Path(sys.argv[1]), int(sys.argv[2]))
    except Exception:  # noqa: BLE001  # whatever it is, torchrun has to hear of it
        traceback.print_exc()
        code = 1
    # Without the interpreter's end: a rank that failed must not wait in it for others that cannot answer.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
