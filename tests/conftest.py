"""Shared fixtures: cells built from the files of `conf/`, and running one of them to its records."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from omegaconf import OmegaConf

from stalefront.batch import LossInputs, Weights
from stalefront.cell import Cell, make_choice
from stalefront.files import read_json, write_json
from stalefront.loss import Loss, LossValue
from stalefront.paths import CellPaths
from stalefront.record import WALL_CLOCK, read_rows
from stalefront.reduction import reduction_BT
from stalefront.run import run_cell

CONF = Path(__file__).parents[1] / "conf"
GROUPS = {
    **{"model": "tiny", "task": "sort5", "delay": "reuse", "loss": "grpo", "optimizer": "adamw", "engine": "native"},
    **{"proximal": "recompute", "reduction": "own", "replay": "none"},
}
LISTS = ("mismatch", "correction", "controller")


class Graded(NamedTuple):
    """A loss and its gradient with respect to log θ of every token."""

    loss: float
    grad_BT: torch.Tensor
    value: LossValue


class Ran(NamedTuple):
    """What a cell left behind."""

    outcome: dict[str, Any]
    rows: list[dict[str, Any]]
    paths: CellPaths


def pytest_configure() -> None:
    torch.set_num_threads(1)
    # Before any import of the hub client: tests make no request.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")


def load_choice(group: str, name: str) -> dict[str, Any]:
    """Plain mapping of `conf/<group>/<name>.yaml`."""
    return OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))


def cell_config(**overrides: Any) -> dict[str, Any]:
    """Configuration of the tiny cell.

    A group takes a file's stem (`delay="lag"`), `correction` and `controller` a list of stems, a top-level field its
    value, and a dotted key (`**{"delay.lag_updates": 3}`) replaces one field.
    """
    config: dict[str, Any] = {"seed": 0, "steps": 8, "device": "cpu", "threads": 1}
    config |= {group: load_choice(group, overrides.pop(group, name)) for group, name in GROUPS.items()}
    for group in LISTS:
        config[group] = {name: load_choice(group, name) for name in overrides.pop(group, [])}
    config["mismatch"]["target_kl"] = None
    config["validation"] = {"every": 4, "num_samples": 16}
    for key, value in overrides.items():
        *parents, leaf = key.split(".")
        node = config
        for name in parents:
            node = node[name]
        if leaf not in node:
            raise KeyError(f"the configuration has no {key}")
        node[leaf] = value
    return config


@pytest.fixture(scope="session")
def make_config() -> Callable[..., dict[str, Any]]:
    """`make_config(delay="lag", steps=4, **{"delay.lag_updates": 3})`: see `cell_config`."""
    return cell_config


@pytest.fixture(scope="session")
def make_cell() -> Callable[..., Cell]:
    """The cell of `make_config`."""
    return lambda **overrides: Cell.from_config(cell_config(**overrides))


@pytest.fixture(scope="session")
def conf_choice() -> Callable[[str, str], dict[str, Any]]:
    """`conf_choice(group, name)`: see `load_choice`."""
    return load_choice


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm-ups shared by all tests of a session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def keep_signals() -> Iterator[None]:
    """Signal handlers as before: a cell installs its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run_in(cache_dir: Path, keep_signals: None) -> Callable[..., Ran]:
    """`run_in(folder, cell, checkpoint_every=64)`: run or continue a cell in `folder`, in this process."""

    def run(
        root: Path, cell: Cell, *, checkpoint_every: int | str = 64, attempt: int = 1, keep_checkpoint: bool = True
    ) -> Ran:
        paths = CellPaths(root)
        options = {
            "checkpoint_every": checkpoint_every,
            "cache_dir": str(cache_dir),
            "keep_checkpoint": keep_checkpoint,
        }
        write_json(paths.config, {"cell_id": cell.cell_id, "cell": cell.as_dict(), "run": options})
        outcome = run_cell(root, attempt=attempt)
        assert outcome == read_json(paths.outcome)
        return Ran(outcome, list(read_rows(paths.steps)), paths)

    return run


@pytest.fixture
def completed(tmp_path: Path, run_in: Callable[..., Ran]) -> Callable[..., list[dict[str, Any]]]:
    """`completed(cell)`: its step records; the cell must complete."""

    def rows(cell: Cell) -> list[dict[str, Any]]:
        ran = run_in(tmp_path / cell.cell_id, cell)
        assert ran.outcome["state"] == "completed", ran.outcome["error"]
        return ran.rows

    return rows


@pytest.fixture(scope="session")
def numbers() -> Callable[[list[dict[str, Any]]], list[str]]:
    """`numbers(rows)`: every column but the wall-clock ones, as text, so that NaN equals NaN."""

    def text(rows: list[dict[str, Any]]) -> list[str]:
        return [json.dumps({k: v for k, v in row.items() if k not in WALL_CLOCK}) for row in rows]

    return text


@pytest.fixture(scope="session")
def make_loss() -> Callable[..., Loss]:
    """`make_loss("grpo", epsilon=0.1)`: the loss of a file in `conf/loss/`, fields replaced."""
    return lambda name, **fields: make_choice("loss", load_choice("loss", name) | fields)


@pytest.fixture(scope="session")
def grade() -> Callable[..., Graded]:
    """`grade(loss, inputs)`: value and gradient, with any reference length L and correction weights."""

    def run(loss: Loss, inputs: LossInputs, *, length: int = 6, weights: Weights | None = None) -> Graded:
        theta = inputs.logp_theta_BT.detach().clone().requires_grad_()
        share = reduction_BT(inputs.mask_BT, loss.reduction, max_completion_length=length)
        value = loss(replace(inputs, logp_theta_BT=theta), weights, share)
        value.loss.backward()
        return Graded(value.loss.item(), theta.grad, value)

    return run


@pytest.fixture(scope="session")
def random_inputs() -> Callable[..., LossInputs]:
    """`random_inputs(seed=0)`: ragged rows, both signs of advantage, |log-ratio| up to `spread`; 0 is on-policy."""

    def make(
        *, seed: int = 0, rows: int = 6, width: int = 5, spread: float = 1.0, dtype: torch.dtype = torch.float64
    ) -> LossInputs:
        random = torch.Generator().manual_seed(seed)

        def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
            return low + (high - low) * torch.rand(shape, generator=random, dtype=dtype)

        length = torch.randint(1, width + 1, (rows,), generator=random)
        theta = uniform(-4.0, -0.1, rows, width)
        old = (theta + uniform(-spread, spread, rows, width)).clamp(max=0) if spread else theta
        return LossInputs(
            logp_theta_BT=theta,
            logp_old_BT=old,
            logp_behav_BT=(old + 1e-3 * uniform(-spread, spread, rows, width)).clamp(max=0),
            logp_ref_BT=uniform(-4.0, -0.1, rows, width),
            advantage_B=uniform(0.2, 2.0, rows) * torch.tensor([1.0, -1.0] * rows, dtype=dtype)[:rows],
            mask_BT=torch.arange(width) < length[:, None],
            reward_B=torch.tensor([1.0, 0.0] * rows, dtype=dtype)[:rows],
            group_B=torch.arange(rows) // 2,
        )

    return make
