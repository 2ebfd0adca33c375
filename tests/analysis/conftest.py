"""A synthetic sweep directory in the contract's format (docs/data_flow.md), and outcome frames for the fits."""

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stalefront.analysis.fits.base import OUTCOME_COLUMNS
from stalefront.analysis.verdicts import Curve

GOLDEN = Path(__file__).parents[1] / "golden"


def cell_config(*, S, lr, seed, steps=64, kind="reuse", **changes):
    """A resolved cell; ``changes`` are dotted keys, e.g. ``**{"loss.beta": 0.04}``."""
    delay = {
        "none": {"choice": "none"},
        "reuse": {"choice": "reuse", "S": S, "minibatches": False},
        "lag": {"choice": "lag", "lag_updates": S - 1, "via": "weights"},
    }[kind]
    cell = {
        "seed": seed,
        "steps": steps,
        "device": "cpu",
        "threads": 1,
        "model": {"choice": "tiny", "checkpoint": None, "ranks": 1},
        "task": {"choice": "sort5", "num_prompts": 8, "num_generations": 8},
        "delay": delay,
        "loss": {"choice": "grpo", "epsilon": 0.2, "beta": 0.0},
        "correction": [],
        "optimizer": {"kind": "adamw", "lr": lr, "warmup_steps": 4},
        "engine": {"choice": "native"},
        "validation": {"every": 4, "num_samples": 128},
    }
    for key, value in changes.items():
        place = cell
        *path, last = key.split(".")
        for part in path:
            place = place[part]
        place[last] = value
    return cell


def step_rows(cell, *, collapse_at=None, recover_at=None, non_finite_at=None, start=0.25, every=4, samples=128):
    """Step records of one run: reward rises, and falls to zero from ``collapse_at`` (learner steps) on."""
    T, lr, seed = cell["steps"], cell["optimizer"]["lr"], cell["seed"]
    S = cell["delay"].get("S", 1)
    rng = np.random.default_rng([seed, int(lr * 1e7), S])
    rows, lr_sum = [], 0.0
    for t in range(T + 1):
        rate = start + (0.7 - start) * (1 - math.exp(-t / T))
        if collapse_at is not None and t >= collapse_at and (recover_at is None or t < recover_at):
            rate = 0.0
        applied = lr * min(1.0, t / 4) if t else None
        lr_sum += applied or 0.0
        dead = non_finite_at is not None and t >= non_finite_at
        validate = t % every == 0 or t == T or dead
        passes = int(rng.binomial(samples, rate)) if validate and not dead else None
        if dead:
            passes = 0
        refresh = S == 1 or t % S == 1
        rows.append(
            {
                "step": t,
                "batch": (t - 1) // S + 1 if t else 0,
                "step_in_batch": (t - 1) % S + 1 if t else 0,
                "at_refresh": bool(t and refresh),
                "lr_applied": applied,
                "lag_mean_updates": (S - 1) / 2 if t else None,
                "lag_max_updates": (t - 1) % S if t else None,
                "reward_train": rate,
                "reward_train_n": 64,
                "reward_train_passes": int(64 * rate),
                "reward_val": (float("nan") if dead else passes / samples) if validate else None,
                "reward_val_n": samples if validate else None,
                "reward_val_passes": passes if validate else None,
                "dist_from_start": math.sqrt(lr_sum) * 3 if t else 0.0,
                "cos_grad": None if t < 2 else (0.08 if refresh else 0.6) + 0.05 * rng.standard_normal(),
            }
        )
        if dead:
            break
    return rows


def write_cell(root, cell_id, cell, rows, *, state="completed", reason=None, torn=""):
    """Write one cell's directory as the learner would leave it."""
    d = root / "cells" / cell_id
    d.mkdir(parents=True)
    last = rows[-1]["step"] if rows else 0
    (d / "config.json").write_text(json.dumps({"format": 1, "cell_id": cell_id, "cell": cell, "run": {}}))
    status = {"state": state, "attempt": 1, "step": last, "steps": cell["steps"], "reason": reason}
    (d / "status.json").write_text(json.dumps(status))
    (d / "steps.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + torn)
    if state in ("completed", "non-finite", "failed", "interrupted"):
        outcome = {
            "cell_id": cell_id,
            "state": state,
            "reason": reason,
            "error": "Traceback …\nRuntimeError: boom" if state == "failed" else None,
            "attempt": 1,
            "resumed_from_step": 0,
            "last_step": last,
            "steps": cell["steps"],
            "wall_s": 7.25,
            "cpu_s": 6.5,
            "peak_rss_bytes": 5 * 10**8,
            "host": "node1",
            "device_name": "cpu",
            "commit": "0123456789abcdef",
            "dirty": False,
            "versions": {"python": "3.11", "torch": "2.13.0", "stalefront": "0.1.0"},
            "warnings": [],
        }
        (d / "outcome.json").write_text(json.dumps(outcome))


def write_plan(root, cells, question="How much staleness does it survive?"):
    """Write plan.json for cell_id → cell."""
    root.mkdir(parents=True, exist_ok=True)
    axes = {"delay.S": sorted({c["delay"].get("S", 1) for c in cells.values()})}
    sweep = {"name": root.name, "question": question, "axes": axes}
    plan = {"format": 1, "sweep": sweep, "cells": {k: {"overrides": [], "cell": c} for k, c in cells.items()}}
    (root / "plan.json").write_text(json.dumps(plan))


def collapse_step(S, lr, seed, constant=8e-3, t_eta=1.2e-2):
    """Where a run of the synthetic law collapses: iff S·η exceeds a constant with seed noise; t·η fixed."""
    noise = math.exp(0.25 * math.sin(12.9 * seed + 3.1 * S + 7.7e3 * lr))
    return None if S * lr < constant * noise else max(2, round(t_eta / lr))


def make_sweep(
    root,
    *,
    S=(1, 4, 16),
    lrs=(1e-3, 2e-3, 4e-3, 8e-3),
    seeds=(0, 1),
    steps=64,
    arms=None,
    recovering=(),
    skip=(),
    states=None,
    kind="reuse",
    pushes=None,
    columns=None,
):
    """Synthesise a whole sweep; returns the directory.

    ``arms``: list of dotted changes, one a arm. ``recovering``: (S, lr) that climb back. ``skip``: (S, lr, seed) with
    no directory. ``states``: (S, lr, seed) → state of an unfinished run. ``pushes``: factor of an arm on the constant
    of the law. ``columns``: columns of every step after the first, one mapping a arm.
    """
    cells, written = {}, []
    for a, changes in enumerate(arms or [{}]):
        for s in S:
            for lr in lrs:
                for seed in seeds:
                    cell = cell_config(S=s, lr=lr, seed=seed, steps=steps, kind=kind, **changes)
                    cell_id = f"c{a}-{s:04d}-{lr:.6g}-{seed}"
                    cells[cell_id] = cell
                    written.append((cell_id, cell, (s, lr, seed), a))
    write_plan(root, cells)
    for cell_id, cell, key, a in written:
        if key in skip:
            continue
        at = collapse_step(*key, constant=8e-3 * (pushes[a] if pushes else 1))
        recover = at + 24 if at is not None and key[:2] in recovering else None
        state = (states or {}).get(key, "completed")
        rows = step_rows(cell, collapse_at=at, recover_at=recover)
        if state == "non-finite":
            rows = step_rows(cell, non_finite_at=10)
        elif state != "completed":
            rows = rows[: steps // 2]
        for row in rows[1:]:
            row.update(columns[a] if columns else {})
        write_cell(root, cell_id, cell, rows, state=state)
    return root


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """A 3 × 4 × 2 sweep with every kind of ending; read-only, shared by all tests."""
    return make_sweep(
        tmp_path_factory.mktemp("sweep") / "demo",
        recovering={(4, 4e-3)},
        skip={(1, 1e-3, 1)},
        states={(1, 8e-3, 1): "failed", (16, 8e-3, 1): "non-finite", (4, 1e-3, 0): "running"},
    )


@pytest.fixture
def sweep(demo, tmp_path):
    """A copy of the demo sweep that a test may change."""
    return Path(shutil.copytree(demo, tmp_path / "demo"))


def outcome_frame(rows):
    """Outcome frame of (S, lr, seed, collapsed[, t]) rows; t in learner steps at constant rate."""
    out = []
    for S, lr, seed, collapsed, *t in rows:
        at = t[0] if t and collapsed else None
        out.append(
            {
                "cell_id": f"{S}-{lr!r}-{seed}",
                "S": S,
                "lr": lr,
                "seed": seed,
                "collapsed": collapsed,
                "step_lo": at,
                "step_hi": at,
                "t_eta_lo": None if at is None else at * lr,
                "t_eta_hi": None if at is None else at * lr,
                "censor_t_eta": None if collapsed else 580 * lr,
            }
        )
    return pd.DataFrame(out, columns=list(OUTCOME_COLUMNS), dtype=object)


def paper_rows(definition):
    """Table 2 as (S, η, seed, collapsed, t) under one definition."""
    with (GOLDEN / "paper_table2.csv").open(newline="") as handle:
        for row in csv.DictReader(handle):
            event = row["t_collapse_first_zero"] != ""
            if definition == "remains_zero":
                event = event and row["recovers"] != "1"
            t = float(row["t_collapse_first_zero"]) if event else None
            yield int(row["S"]), float(row["eta"]), 0, event, t


@pytest.fixture(scope="session")
def golden():
    """The re-analysis of Table 2 of arXiv 2607.01083."""
    return json.loads((GOLDEN / "golden_frontier.json").read_text())


@pytest.fixture(params=["first_zero", "remains_zero"])
def paper(request):
    """(definition, outcome frame) of Table 2."""
    return request.param, outcome_frame(paper_rows(request.param))


# Test modules reach the helpers through fixtures: under importlib mode they cannot import one another.
@pytest.fixture(scope="session", name="outcome_frame")
def outcome_frame_():
    return outcome_frame


@pytest.fixture(scope="session", name="make_sweep")
def make_sweep_():
    return make_sweep


@pytest.fixture(scope="session", name="cell_config")
def cell_config_():
    return cell_config


@pytest.fixture(scope="session", name="step_rows")
def step_rows_():
    return step_rows


@pytest.fixture(scope="session", name="write_cell")
def write_cell_():
    return write_cell


@pytest.fixture(scope="session", name="write_plan")
def write_plan_():
    return write_plan


@pytest.fixture(scope="session")
def curve():
    """Make a curve from passes per point, 128 samples each, 4 learner steps apart."""

    def make(passes, *, n=128, every=4, horizon=None, end="horizon", reward=None):
        steps = np.arange(len(passes), dtype=np.int64) * every
        samples = np.full(len(passes), n, dtype=np.int64)
        counts = np.array(passes, dtype=np.int64)
        values = counts / n if reward is None else np.array(reward, dtype=np.float64)
        last = int(steps[-1]) if len(steps) else 0
        return Curve(steps, samples, counts, values, horizon or last, last, end)

    return make
