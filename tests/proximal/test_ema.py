"""An averaged proximal policy: the average by hand, its limits, what it does in a run, and continuing."""

import pytest
import torch

from stalefront.average import Average
from stalefront.choice import OptionError
from stalefront.paths import CellPaths

TINY = {"steps": 8, "model.warmup.steps": 200, "model.warmup.batch_size": 64, "optimizer.warmup_steps": 0}


@pytest.fixture
def model(make_cell):
    options = make_cell().model
    return options.build(options.tokenizer(), seed=0)


def entries(tensors):
    return torch.cat([t.detach().reshape(-1).float() for t in tensors])


def test_the_average_by_hand(model, make_cell):
    average = Average(model, 0.75, make_cell().model)
    start = entries(model.parameters()).clone()
    assert torch.equal(entries(average.values), start)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    average.update()
    assert torch.allclose(entries(average.values) - start, torch.tensor(0.25), atol=1e-6)
    average.update()
    # 1 − .75²
    assert torch.allclose(entries(average.values) - start, torch.tensor(0.4375), atol=1e-6)
    assert torch.equal(entries(average.module.parameters()), entries(average.values))


def test_an_average_of_bfloat16_is_kept_in_float32(make_cell):
    options = make_cell(**{"model.dtype": "bfloat16"}).model
    model = options.build(options.tokenizer(), seed=0)
    average = Average(model, 0.999, options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
    start = entries(average.values).clone()
    average.update()
    # Steps this small would be lost in bfloat16.
    assert torch.allclose(entries(average.values) - start, torch.tensor(5e-4), atol=5e-5)
    assert {value.dtype for value in average.values} == {torch.float32}
    assert {p.dtype for p in average.module.parameters()} == {torch.bfloat16}
    other = Average(model, 0.999, options)
    other.load_state_dict(average.state_dict())
    assert torch.equal(entries(other.values), entries(average.values))
    assert torch.equal(entries(other.module.parameters()), entries(average.module.parameters()))


def test_decay_0_is_the_present_policy_to_the_last_bit(make_cell, completed):
    rows = completed(make_cell(**TINY, proximal="ema", **{"proximal.decay": 0.0}))[1:]
    for row in rows:
        assert row["theta_old_ratio_max"] == row["theta_old_ratio_mean"] == 1.0
        assert row["theta_mu_logratio_mean"] == pytest.approx(row["old_mu_logratio_mean"])
    assert any(row["theta_mu_ratio_max"] > 1.01 for row in rows)


def test_near_decay_1_the_first_batch_is_that_of_recompute(make_cell, completed):
    """π₀ sampled it, and the average stays at π₀: old is the same policy."""
    exact = completed(make_cell(**TINY))[1:5]
    frozen = completed(make_cell(**TINY, proximal="ema", **{"proximal.decay": 1 - 1e-9}))[1:5]
    for a, b in zip(exact, frozen, strict=True):
        for name in ("loss", "theta_old_logratio_abs_mean", "update_norm", "clip_high_frac", "theta_mu_ratio_max"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("overrides", [{}, {"delay": "lag", "optimizer.grad_accum": 2}])
def test_a_continued_run_is_the_whole_one(overrides, make_cell, run_in, tmp_path, numbers):
    cell = make_cell(**TINY, proximal="ema", **overrides)
    whole = run_in(tmp_path / "whole", cell, checkpoint_every=3)
    assert whole.outcome["state"] == "completed", whole.outcome["error"]
    assert any(abs(row["theta_old_logratio_mean"]) > 0 for row in whole.rows[1:])
    paths = CellPaths(tmp_path / "parts")
    paths.checkpoint.parent.mkdir(parents=True)
    paths.checkpoint.write_bytes(whole.paths.checkpoint.read_bytes())
    paths.steps.write_bytes(whole.paths.steps.read_bytes())
    ran = run_in(paths.root, cell, checkpoint_every=3, attempt=2)
    assert ran.outcome["resumed_from_step"] == 6
    assert numbers(ran.rows) == numbers(whole.rows)


def test_skipped_steps_do_not_enter_it(make_cell, completed):
    """With every second step skipped or not, the average follows applied updates alone."""
    skipping = {"controller.gac.low": -1.0, "controller.gac.high": -1.0}
    rows = completed(make_cell(**TINY, proximal="ema", controller=["gac"], **skipping))[1:]
    # Only the first step has nothing to compare with: all others are skipped.
    assert [row["stepped"] for row in rows] == [True] + [False] * 7
    spreads = {row["theta_old_logratio_abs_mean"] for row in rows[1:4]}
    assert len(spreads) == 1


def test_refusal(make_cell):
    with pytest.raises(OptionError, match="below 1"):
        make_cell(proximal="ema", **{"proximal.decay": 1.0})


def test_old_to_mu_may_be_corrected_for(make_cell):
    """With another proximal policy than the sampling weights old/μ is not 1."""
    cell = make_cell(proximal="ema", correction=["token_tis"], **{"correction.token_tis.anchor": "old/mu"})
    assert cell.correction[0].anchor == "old/mu"
