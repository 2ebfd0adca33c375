"""One attempt at one cell: from its directory to its outcome, whatever happens in between."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import time
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

from stalefront.build import check_identity
from stalefront.cell import FINISHED, Cell
from stalefront.files import read_json, write_json
from stalefront.paths import CellPaths
from stalefront.session import Session

# Seconds between two writes of status.json; a status is a courtesy, the step file is the record.
STATUS_EVERY_S = 1.0


def run_cell(root: Path, *, attempt: int = 1) -> dict[str, Any]:
    """Run or continue the cell in `root`, whose claim for `attempt` the caller holds; returns its outcome.

    An exception becomes the outcome `failed` with its traceback and is not raised: the outcome is always written.
    """
    paths = CellPaths(root)
    started, clock, cpu = utc_now(), time.perf_counter(), time.process_time()
    config = read_json(paths.config)
    status = Status(paths, attempt, int(config["cell"]["steps"]), started)
    session = Session(
        paths, attempt=attempt, checkpoint_every=config["run"]["checkpoint_every"], on_status=status.update
    )
    session.stop_on_signals()
    reason, error = "", ""
    try:
        cell = Cell.from_config(config["cell"])
        check_identity(cell, config["cell_id"])
        state = _run(cell, Path(config["run"]["cache_dir"]), session)
    except Exception as problem:  # noqa: BLE001  # the one place that may: a cell's failure is a row, not a crash
        state, reason, error = "failed", f"{type(problem).__name__}: {problem}", traceback.format_exc()
    finally:
        session.close()
    outcome = {
        "cell_id": config["cell_id"],
        "state": state,
        "reason": reason or REASONS.get(state, ""),
        "error": error,
        "attempt": attempt,
        "resumed_from_step": session.resumed_from_step,
        "last_step": session.last_step,
        "steps": status.steps,
        "started_utc": started,
        "finished_utc": utc_now(),
        "wall_s": time.perf_counter() - clock,
        "cpu_s": time.process_time() - cpu,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "host": socket.gethostname(),
        "device_name": device_name(config["cell"]["device"]),
        **code_version(),
        "versions": versions(),
        "warnings": session.warnings,
    }
    write_json(paths.outcome, outcome)
    if state in FINISHED and not config["run"].get("keep_checkpoint"):
        shutil.rmtree(paths.checkpoint.parent, ignore_errors=True)
    status.write(state, outcome["reason"])
    return outcome


REASONS = {"non-finite": "parameters are not finite", "interrupted": "asked to stop"}


def _run(cell: Cell, cache: Path, session: Session) -> str:
    import torch

    from stalefront.build import build

    torch.set_num_threads(cell.threads)
    torch.manual_seed(cell.seed)
    if cell.device.startswith("cuda"):
        # Some kernels have no deterministic form; torch then warns in the cell's log.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return cell.engine.run(cell, build(cell, cache), session)


class Status:
    """Keeps `status.json` about a second fresh."""

    def __init__(self, paths: CellPaths, attempt: int, steps: int, started_utc: str) -> None:
        self.paths, self.attempt, self.steps, self.started = paths, attempt, steps, started_utc
        self.step = 0
        self.reward_val: float | None = None
        self._written = 0.0
        self.write("running", "")

    def update(self, step: int, reward_val: float | None) -> None:
        """Note progress; written at most once a second."""
        self.step, self.reward_val = step, reward_val
        if time.monotonic() - self._written >= STATUS_EVERY_S:
            self.write("running", "")

    def write(self, state: str, reason: str) -> None:
        """Write the status now."""
        self._written = time.monotonic()
        write_json(
            self.paths.status,
            {
                "state": state,
                "attempt": self.attempt,
                "step": self.step,
                "steps": self.steps,
                "reward_val": self.reward_val,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "started_utc": self.started,
                "updated_utc": utc_now(),
                "reason": reason,
            },
        )


def utc_now() -> str:
    """Time now, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def device_name(device: str) -> str:
    """Name of the processor that computes."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of what computes the numbers."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "trl", "stalefront"):
        found[name] = importlib.metadata.version(name)
    return found


@lru_cache(maxsize=1)
def code_version() -> dict[str, Any]:
    """Commit of the checkout this package runs from and whether it is dirty; null outside a checkout."""
    here = str(Path(__file__).parent)
    commit = _git(here, "rev-parse", "HEAD")
    dirty = _git(here, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if commit is None else bool(dirty)}


def _git(folder: str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
