"""What the benchmarks share: the default cell, spreads, and results with the machine they were measured on."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from omegaconf import OmegaConf

from stalefront.files import write_json

ROOT = Path(__file__).parents[1]
GROUPS = {"model": "tiny", "task": "sort5", "delay": "reuse", "loss": "grpo", "optimizer": "adamw"}


def cell_config(*, engine: str = "native", **fields: Any) -> dict[str, Any]:
    """Configuration of the default cell, top-level `fields` replaced."""
    config: dict[str, Any] = {"seed": 0, "steps": 256, "device": "cpu", "threads": 1}
    for group, name in {**GROUPS, "engine": engine}.items():
        config[group] = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / group / f"{name}.yaml"))
    config["correction"] = []
    config["validation"] = {"every": 4, "num_samples": 128}
    return config | fields


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def machine() -> dict[str, Any]:
    """Where a measurement was taken."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "commit": commit.stdout.strip(),
        "load_average": os.getloadavg()[0],
    }


def write_result(name: str, result: dict[str, Any]) -> None:
    """Write `bench/results/<name>.json` and print it."""
    path = ROOT / "bench" / "results" / f"{name}.json"
    write_json(path, {"machine": machine(), **result})
    print(path.read_text())
