"""Golden files of other frameworks' code, and ways to change them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "golden" / "peers"


@pytest.fixture
def golden() -> Callable[[str], Path]:
    """`golden("verl__cispo__eps02")`: path of a golden file."""
    return lambda name: FOLDER / f"{name}.json"


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str, Callable[[dict[str, Any]], None]], Path]:
    """`changed(name, change)`: path of a copy that `change` has altered."""

    def make(name: str, change: Callable[[dict[str, Any]], None]) -> Path:
        stored = json.loads((FOLDER / f"{name}.json").read_text())
        change(stored)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(stored))
        return path

    return make


@pytest.fixture
def wild() -> Callable[[int], dict[str, np.ndarray]]:
    """`wild(seed)`: arrays of a golden file's inputs, with extreme ratios, an empty row and advantages of tokens."""

    def make(seed: int, rows: int = 6, width: int = 8) -> dict[str, np.ndarray]:
        random = np.random.default_rng(seed)
        theta = random.uniform(-4, -0.05, (rows, width))
        old = np.minimum(theta + random.uniform(-1, 1, theta.shape), 0)
        mu = np.minimum(old + random.uniform(-1, 1, theta.shape), 0)
        # exp(±25) and beyond: clamps of log-ratios act.
        mu[0, 0], old[1, 1], old[2, 0] = old[0, 0] - 26, theta[1, 1] - 24, mu[2, 0] - 25
        mask = random.uniform(size=theta.shape) < 0.8
        mask[3], mask[0, 0], mask[1, 1], mask[2, 0] = False, True, True, True
        advantages = np.repeat(random.uniform(-2, 2, (rows, 1)), width, 1)
        advantages[4] = random.uniform(-1, 1, width)
        groups = np.repeat(np.arange(2), rows // 2)
        # Multiples of 1/1024, which float32 holds exactly, as in the golden files.
        theta, old, mu = (np.round(logp * 1024) / 1024 for logp in (theta, old, mu))
        named = {"logp_theta": theta, "logp_old": old, "logp_mu": mu, "advantages": advantages}
        return named | {"mask": mask.astype(float), "group_ids": groups, "versions": np.zeros(theta.shape, int)}

    return make


@pytest.fixture
def verdict(
    changed: Callable[[str, Callable[[dict[str, Any]], None]], Path],
) -> Callable[..., str]:
    """`verdict(name, settings, inputs, outputs)`: parity of a golden file with other settings and numbers."""
    from stalefront.parity import GoldenFile, check

    def find(name: str, settings: dict[str, Any], inputs: dict[str, np.ndarray], outputs: dict[str, Any]) -> str:
        def change(stored: dict[str, Any]) -> None:
            stored["settings"].update(settings)
            stored["inputs"] = {key: value.tolist() for key, value in inputs.items()}
            stored["outputs"] = {key: np.asarray(value).tolist() for key, value in outputs.items()}

        outcome = check(GoldenFile.read(changed(name, change)))
        return f"{outcome.state} {outcome.detail}".strip()

    return find
