"""One attempt at one cell: from its directory to its outcome, whatever happens in between."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalefront.build import check_identity
from stalefront.cell import FINISHED, Cell
from stalefront.claims import slurm_job
from stalefront.files import read_json, write_json
from stalefront.outcome import device_name, make_outcome, utc_now
from stalefront.paths import CellPaths
from stalefront.ranks import SINGLE, Ranks
from stalefront.session import Session

# Seconds between two writes of status.json; a status is a courtesy, the step file is the record.
STATUS_EVERY_S = 1.0


def run_cell(
    root: Path, *, attempt: int = 1, ranks: Ranks = SINGLE, asked: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Run or continue the cell in `root`, whose claim for `attempt` the caller holds; returns its outcome.

    An exception becomes the outcome `failed` with its traceback and is not raised: the outcome is always written. Of
    several `ranks` the first writes it, or else the one that fails first. `asked`: see `Session`.
    """
    paths = CellPaths(root)
    started, clock, cpu = utc_now(), time.perf_counter(), time.process_time()
    config = read_json(paths.config)
    status = Status(paths, attempt, int(config["cell"]["steps"]), started, writes=ranks.leads)
    every = config["run"]["checkpoint_every"]
    session = Session(paths, attempt=attempt, checkpoint_every=every, on_status=status.update, ranks=ranks, asked=asked)
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
    outcome = make_outcome(
        config,
        state=state,
        reason=reason or REASONS.get(state, ""),
        error=error,
        attempt=attempt,
        started_utc=started,
        resumed_from_step=session.resumed_from_step,
        last_step=session.last_step,
        wall_s=time.perf_counter() - clock,
        cpu_s=time.process_time() - cpu,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        device_name=device_name(config["cell"]["device"]),
        warnings=session.warnings,
    )
    # The others fail after the rank that fails first, and because of it: theirs is not the reason.
    if ranks.size == 1 or (not paths.outcome.exists() if state == "failed" else ranks.leads):
        write_json(paths.outcome, outcome)
    if ranks.leads and state in FINISHED and not config["run"].get("keep_checkpoint"):
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
    return cell.engine.run(cell, build(cell, cache, session.ranks), session)


class Status:
    """Keeps `status.json` about a second fresh; of several ranks one `writes`."""

    def __init__(self, paths: CellPaths, attempt: int, steps: int, started_utc: str, *, writes: bool = True) -> None:
        self.writes = writes
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
        if not self.writes:
            return
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
                "job": slurm_job()[0] or None,
                "pid": os.getpid(),
                "started_utc": self.started,
                "updated_utc": utc_now(),
                "reason": reason,
            },
        )
