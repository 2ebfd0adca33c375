"""`outcome.json`: how an attempt ended, whoever writes it down."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import socket
from functools import lru_cache
from pathlib import Path
from typing import Any

from stalefront.claims import slurm_job
from stalefront.files import read_json, write_json
from stalefront.freeze import code_version, package_version
from stalefront.observe import read_tail
from stalefront.paths import CellPaths

LOG_TAIL_LINES = 20


def make_outcome(
    config: dict[str, Any], *, state: str, reason: str, error: str, attempt: int, started_utc: str, **known: Any
) -> dict[str, Any]:
    """Content of `outcome.json`. What only the process of the cell can know is null unless it is in `known`.

    Parameters
    ----------
    config
        Content of the cell's `config.json`.
    """
    outcome = {
        "cell_id": config["cell_id"],
        "state": state,
        "reason": reason,
        "error": error,
        "attempt": attempt,
        "resumed_from_step": None,
        "last_step": None,
        "steps": config["cell"]["steps"],
        "started_utc": started_utc,
        "finished_utc": utc_now(),
        "wall_s": None,
        "cpu_s": None,
        "peak_rss_bytes": None,
        "host": socket.gethostname(),
        "job": slurm_job()[0] or None,
        "device_name": None,
        **code_version(),
        "versions": versions(),
        "warnings": [],
    }
    assert known.keys() <= outcome.keys(), known.keys() - outcome.keys()
    return {**outcome, **known}


def record_death(paths: CellPaths, attempt: int, state: str, reason: str, **known: Any) -> None:
    """Write the outcome of an attempt whose process ended without writing one, or never began."""
    config, status = read_json(paths.config), read_json(paths.status) or {}
    mine = status if status.get("attempt") == attempt else {}
    started = str(mine.get("started_utc") or utc_now())
    began = datetime.datetime.strptime(started, "%Y-%m-%dT%H:%M:%S%z")
    outcome = make_outcome(
        config,
        state=state,
        reason=reason,
        error=log_tail(paths.log) if mine else "",
        attempt=attempt,
        started_utc=started,
        last_step=read_tail(paths.steps).last_step,
        wall_s=(datetime.datetime.now(datetime.UTC) - began).total_seconds(),
        **known,
    )
    write_json(paths.outcome, outcome)
    if mine:
        write_json(paths.status, {**mine, "state": state, "reason": reason, "updated_utc": utc_now()})


def log_tail(log: Path) -> str:
    """Last lines of a log."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-LOG_TAIL_LINES:])


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
    for name in ("torch", "transformers", "trl"):
        found[name] = importlib.metadata.version(name)
    return {**found, "stalefront": package_version()}
