"""`engine=trl` against our own loop: the same cell, the same rollouts, the same parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from stalefront.build import build
from stalefront.cell import Cell
from stalefront.choice import OptionError
from stalefront.paths import CellPaths
from stalefront.record import WALL_CLOCK, read_rows
from stalefront.session import Session

# How far the two may be apart: ‖θ_TRL − θ_ours‖ / ‖θ_ours − θ₀‖ after 8 updates. Measured: see `test_same_parameters`.
TOLERANCE = 1e-4
QUICK = {"model.warmup.steps": 100, "optimizer.lr": 1e-3, "optimizer.warmup_steps": 4}
# What TRL does not compute, or defines otherwise.
NOT_MEASURED = {
    *(
        f"{pair}_{name}"
        for pair in ("theta_mu", "theta_old", "old_mu")
        for name in (
            "ratio_mean",
            "ratio_max",
            "logratio_mean",
            "logratio_abs_mean",
            "logratio_q05",
            "logratio_q50",
            "logratio_q95",
            "k3_nats",
        )
    ),
    *("ess_token_frac", "ess_seq_frac", "kl_ref_k1_nats", "kl_ref_k3_nats"),
    *("weight_mean", "weight_min", "mask_frac", "wall_score_s"),
}


class Trained(NamedTuple):
    state: str
    theta: torch.Tensor
    start: torch.Tensor
    rows: list[dict[str, Any]]


@pytest.fixture
def train(tmp_path: Path, cache_dir: Path) -> Callable[..., Trained]:
    """`train(cell)`: its parameters and rows; `stop_at` asks for a stop after that step."""

    def run(cell: Cell, *, stop_at: int | None = None, attempt: int = 1) -> Trained:
        torch.manual_seed(cell.seed)
        parts = build(cell, cache_dir)
        paths = CellPaths(tmp_path / cell.cell_id)

        def note(step: int, _: float | None) -> None:
            session.stop_requested = step == stop_at

        session = Session(paths, attempt=attempt, checkpoint_every=1000, on_status=note)
        start = torch.nn.utils.parameters_to_vector(parts.model.parameters()).detach().clone()
        state = cell.engine.run(cell, parts, session)
        session.close()
        theta = torch.nn.utils.parameters_to_vector(parts.model.parameters()).detach()
        return Trained(state, theta, start, list(read_rows(paths.steps)))

    return run


REUSE = {"delay": "reuse", "delay.S": 4}
CASES = [
    *(
        {"loss": loss, "loss.beta": beta, **delay}
        for loss in ("grpo", "dapo", "gspo")
        for beta in (0.0, 0.04)
        for delay in ({"delay": "none"}, REUSE)
    ),
    *({"loss": loss, "loss.beta": 0.04, **REUSE} for loss in ("bnpo", "dr_grpo", "cispo")),
    {"loss": "grpo", "loss.beta": 0.04, "loss.use_bias_correction_kl": False, **REUSE},
    {"loss": "dapo", "optimizer.grad_accum": 4, **REUSE},
    {"loss": "grpo", "optimizer": "sgd", "optimizer.max_grad_norm": None, "optimizer.weight_decay": 0.1, **REUSE},
    {"loss": "grpo", "task.temperature": 0.7, "loss.scale_rewards": "batch", **REUSE},
]


@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(map(str, o.values())))
def test_same_parameters(options, make_cell, train):
    ours, theirs = (train(make_cell(steps=8, engine=engine, **(QUICK | options))) for engine in ("native", "trl"))
    assert theirs.state == ours.state == "completed"
    assert torch.equal(theirs.start, ours.start)
    travelled = float((ours.theta - ours.start).norm())
    apart = float((theirs.theta - ours.theta).norm())
    print(f"apart {apart / travelled:.1e} of the way, {apart / float(ours.theta.norm()):.1e} of the norm")
    assert travelled > 0
    assert apart / travelled < TOLERANCE
