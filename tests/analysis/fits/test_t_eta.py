"""t·η: the paper's constant, censoring that is never dropped, intervals."""

import math

import numpy as np
import pytest
from scipy import stats

from stalefront.analysis.fits.t_eta import fit_t_eta


def test_table_2_is_exactly_constant(paper, golden):
    definition, frame = paper
    fit = fit_t_eta(frame, definition=definition, arm="all")
    c = fit.constants
    assert c["t_eta"].value == pytest.approx(golden["aft"]["events_only_exact"]["exp_a"])
    assert c["max_over_min"].value == pytest.approx(1.0)
    assert c["cv"].value == pytest.approx(0.0, abs=1e-12)
    assert c["slope"].value == pytest.approx(-golden["aft"]["events_only_exact"]["b"])
    assert fit.n + fit.n_right == 12
    largest = {"first_zero": 2e-7, "remains_zero": 5e-7}[definition]
    assert c["largest_censored"].value == pytest.approx(580 * largest)
    assert len(fit.rows) == fit.n_right
    assert any("right-censored" in n for n in fit.notes)


def test_chart_reads(outcome_frame, golden):
    want = golden["aft"]["chart_reads"]
    rates = [1e-6, 1e-6, 1e-6, 2e-7, 1e-7]
    rows = [(8, r, i, True, te / r) for i, (r, te) in enumerate(zip(rates, want["t_eta"], strict=True))]
    # One seed label for all: five reads of five cells, not five seeds.
    frame = outcome_frame(rows).assign(seed=0)
    c = fit_t_eta(frame, definition="d", arm="all").constants
    assert c["t_eta"].value == pytest.approx(want["geomean"], rel=2e-3)
    assert c["max_over_min"].value == pytest.approx(want["max_over_min"], abs=0.005)
    assert -c["slope"].value == pytest.approx(want["ols_b"], abs=0.005)
    assert c["slope"].interval.lo == pytest.approx(-0.885, abs=0.005)
    assert c["slope"].interval.hi == pytest.approx(-0.562, abs=0.005)


def test_interval_is_students_t_on_logs_below_five_seeds(outcome_frame):
    times = [100, 130, 90, 160]
    rows = [(4, 1e-3, seed, True, t) for seed, t in enumerate(times)]
    interval = fit_t_eta(outcome_frame(rows), definition="d", arm="all").constants["t_eta"].interval
    logs = np.log(np.array(times) * 1e-3)
    lo, hi = stats.t.interval(0.95, 3, loc=logs.mean(), scale=stats.sem(logs))
    assert interval.kind == "t"
    assert (interval.lo, interval.hi) == pytest.approx((math.exp(lo), math.exp(hi)))


def test_interval_is_a_bootstrap_over_seeds_from_five_on(outcome_frame):
    rng = np.random.default_rng(2)
    rows = []
    for seed in range(12):
        shift = 0.4 * rng.standard_normal()
        rows += [(4, lr, seed, True, 0.06 / lr * math.exp(shift)) for lr in (1e-3, 2e-3, 4e-3)]
    fit = fit_t_eta(outcome_frame(rows), definition="d", arm="all")
    interval = fit.constants["t_eta"].interval
    assert interval.kind == "bootstrap"
    assert interval.contains(0.06)
    # Clustered by seed: the spread of 12 seed means, not of 36 cells.
    width = math.log(interval.hi / interval.lo)
    assert width == pytest.approx(2 * 1.96 * 0.4 / math.sqrt(12), rel=0.45)
    again = fit_t_eta(outcome_frame(rows), definition="d", arm="all")
    assert again.constants["t_eta"].interval == interval


def test_no_event_still_reports_what_is_censored(outcome_frame):
    fit = fit_t_eta(outcome_frame([(4, 1e-3, 0, False), (4, 2e-3, 0, None)]), definition="d", arm="all")
    assert "t_eta" not in fit.constants
    assert fit.n_right == 1
    assert fit.n_undecided == 1
    assert fit.constants["largest_censored"].value == pytest.approx(580 * 1e-3)


def test_one_event_has_no_interval(outcome_frame):
    fit = fit_t_eta(outcome_frame([(4, 1e-3, 0, True, 50)]), definition="d", arm="all")
    assert fit.constants["t_eta"].interval is None
    assert "slope" not in fit.constants


def test_an_event_before_any_update_is_counted_not_averaged(outcome_frame):
    fit = fit_t_eta(outcome_frame([(4, 1e-3, 0, True, 0), (4, 1e-3, 1, True, 50)]), definition="d", arm="all")
    assert (fit.n, fit.n_events) == (1, 2)
    assert any("no logarithm" in n for n in fit.notes)


def test_undecided_runs_are_counted_as_undecided_and_nothing_else(outcome_frame):
    rows = [(4, 1e-3, 0, True, 50), (4, 2e-3, 0, False), (4, 8e-3, 0, None), (4, 8e-3, 1, None), (4, 0.0, 0, False)]
    fit = fit_t_eta(outcome_frame(rows), definition="d", arm="all")
    assert (fit.n, fit.n_right, fit.n_undecided) == (1, 1, 3)
    assert fit.rows == [{"censor_t_eta": pytest.approx(580 * 2e-3)}]
