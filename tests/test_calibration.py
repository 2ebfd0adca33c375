"""How strong a mismatch must be: the search on functions that are known, and what a cell makes of it."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront import calibration
from stalefront.build import build
from stalefront.calibration import ACCEPTED, CLOSE, LARGEST, Found, calibrate, measured_kl, solve
from stalefront.choice import OptionError
from stalefront.loop import Learner
from stalefront.paths import CellPaths

PLAIN = {"model.warmup": None, "task.num_prompts": 4, "task.num_generations": 4}


class Counted:
    """A function that counts how often it is asked."""

    def __init__(self, function):
        self.function, self.asked = function, []

    def __call__(self, factor):
        self.asked.append(factor)
        return self.function(factor)


@pytest.mark.parametrize("target", [1e-9, 1e-4, 0.3, 1e6])
def test_a_quadratic_takes_two_measurements(target):
    measure = Counted(lambda f: 0.02 * f**2)
    found = solve(measure, target, LARGEST)
    # f = √(target / .02), which the second guess is by itself.
    assert found.factor == pytest.approx(math.sqrt(target / 0.02), rel=1e-9)
    assert found.kl_nats == pytest.approx(target, rel=1e-9)
    assert len(measure.asked) <= 2


@pytest.mark.parametrize(
    ("function", "inverse"),
    [
        (lambda f: f, lambda y: y),
        (lambda f: f**4, lambda y: y**0.25),
        (lambda f: 0.1 * (1 - math.exp(-(f**2))), lambda y: math.sqrt(-math.log1p(-y / 0.1))),
        (lambda f: math.expm1(f), lambda y: math.log1p(y)),
        (lambda f: math.tanh(f) ** 3, lambda y: math.atanh(y ** (1 / 3))),
    ],
    ids=["linear", "quartic", "saturating", "exponential", "sigmoid"],
)
@pytest.mark.parametrize("target", [1e-6, 1e-3, 0.09])
def test_increasing_functions_are_inverted(function, inverse, target):
    measure = Counted(function)
    found = solve(measure, target, LARGEST)
    assert found.kl_nats == pytest.approx(target, rel=CLOSE)
    assert found.kl_nats == function(found.factor)
    assert found.factor == pytest.approx(inverse(target), rel=0.03)
    assert len(measure.asked) <= 20
    assert min(measure.asked) > 0


def test_of_a_jump_the_nearer_side_is_taken():
    def steps(f):
        return math.floor(10 * f) / 100

    assert solve(steps, 0.05, LARGEST).kl_nats == pytest.approx(0.05)
    # Between 0.03 and 0.04, which is nearer.
    measure = Counted(steps)
    found = solve(measure, 0.037, LARGEST)
    assert found.kl_nats == pytest.approx(0.04)
    assert 0.4 <= found.factor < 0.5
    assert len(measure.asked) < 40


def test_what_is_nothing_everywhere_is_not_reached():
    measure = Counted(lambda f: 0.0)
    found = solve(measure, 1e-3, LARGEST)
    assert found.kl_nats == 0
    assert measure.asked[-1] == LARGEST
    assert len(measure.asked) < 15


def test_a_bound_is_kept_and_tried():
    measure = Counted(lambda f: 0.01 * f**2)
    assert solve(measure, 1.0, 2.0) == Found(2.0, 0.04)
    assert max(measure.asked) == 2.0
    # Saturated below what is asked for.
    measure = Counted(lambda f: min(f, 1.0) ** 2 / 100)
    assert solve(measure, 1.0, 50.0).kl_nats == 0.01
    assert measure.asked[-1] == 50.0


@pytest.mark.parametrize("size", [0.05, 0.3])
def test_noise_leaves_a_factor_that_was_measured(size):
    random = torch.Generator().manual_seed(0)

    def noisy(f):
        return f**2 * (1 + size * float(torch.rand((), generator=random) - 0.5))

    found = solve(Counted(noisy), 1e-3, LARGEST)
    assert abs(found.kl_nats / 1e-3 - 1) <= ACCEPTED
    assert found.factor == pytest.approx(math.sqrt(1e-3), rel=size)


@pytest.mark.parametrize("beyond", [math.nan, math.inf])
def test_beyond_what_is_finite_lies_no_answer(beyond):
    found = solve(lambda f: f**2 if f < 0.5 else beyond, 0.04, LARGEST)
    assert found.factor == pytest.approx(0.2, rel=CLOSE)
    assert math.isnan(solve(lambda f: math.nan, 0.04, LARGEST).kl_nats)


@pytest.fixture
def learner(make_cell, cache_dir):
    """`learner(…)`: of a cell without warm-up."""

    def make(**overrides):
        cell = make_cell(**PLAIN | overrides)
        return Learner(cell, build(cell, cache_dir))

    return make


def test_the_kl_that_was_asked_for_is_there(learner):
    it = learner(mismatch=["logit_noise"], **{"mismatch.target_kl": 2e-3, "task.num_prompts": 16})
    row = it.start_row()
    factor = row["mismatch_factor"]
    assert row["mismatch_kl_nats"] == pytest.approx(2e-3, rel=CLOSE)
    # KL of noise of standard deviation s is s²/2 · (1 − Σp²), and 16 words are almost equally likely.
    assert factor * 0.1 == pytest.approx(math.sqrt(2 * 2e-3 / (1 - 1 / 16)), rel=0.1)
    assert it.source.inference.active[0].strength == factor
    # Other random numbers than the calibration's, and an estimate from samples.
    assert it.advance()[1]["mismatch_k3_nats"] == pytest.approx(2e-3, rel=0.5)


def test_one_factor_for_all_entries(learner):
    entries = {"mismatch": ["logit_noise", "temperature", "int8"], "mismatch.temperature.strength": 0.25}
    it = learner(**entries, **{"mismatch.target_kl": 5e-3})
    factor = it.start_row()["mismatch_factor"]
    assert [entry.strength for entry in it.source.inference.active] == [factor, 0.25 * factor, factor]
    measured = measured_kl(it.cell, it.parts, it.source.inference, factor)
    assert measured == pytest.approx(5e-3, rel=CLOSE)
    assert measured_kl(it.cell, it.parts, it.source.inference, 0.0) == pytest.approx(0, abs=1e-7)


def test_of_more_entries_than_fit_the_first_columns_are_looked_at(learner, monkeypatch):
    it = learner(mismatch=["logit_noise"], **{"mismatch.target_kl": 1e-3})
    measured = []
    kl_full = calibration.kl_full
    monkeypatch.setattr(calibration, "kl_full", lambda p, q: measured.append(len(p)) or kl_full(p, q))
    # 16 sequences and 16 words: two columns of six; every sequence has a first token.
    monkeypatch.setattr(calibration, "ENTRIES", 3 * 16 * 16 - 1)
    two = measured_kl(it.cell, it.parts, it.source.inference, 1.0)
    monkeypatch.setattr(calibration, "ENTRIES", 1)
    one = measured_kl(it.cell, it.parts, it.source.inference, 1.0)
    assert len(measured) == 2
    assert 16 < measured[0] <= 32
    assert measured[1] == 16
    assert one == pytest.approx(two, rel=0.5)


def test_a_mismatch_of_the_log_alone_is_judged_by_what_is_written_down(learner):
    it = learner(mismatch=["logp_noise"], **{"mismatch.target_kl": 0.01, "task.num_prompts": 16})
    row = it.start_row()
    # K3 is σ²/2, from some hundred tokens.
    assert row["mismatch_factor"] * 0.045 == pytest.approx(math.sqrt(2 * 0.01), rel=0.2)
    assert row["mismatch_kl_nats"] == pytest.approx(0.01, rel=CLOSE)


def test_a_target_of_nothing_is_no_mismatch(learner, make_cell, completed, numbers):
    it = learner(mismatch=["logit_noise", "int8"], **{"mismatch.target_kl": 0})
    row = it.start_row()
    assert (row["mismatch_factor"], row["mismatch_kl_nats"]) == (0, 0)
    assert it.source.inference.active == []
    without = completed(make_cell(**PLAIN))
    nothing = completed(make_cell(**PLAIN, mismatch=["logit_noise"], **{"mismatch.target_kl": 0}))
    assert numbers(without)[1:] == numbers(nothing)[1:]
    assert without[0]["mismatch_factor"] is None
    assert calibrate(make_cell(**PLAIN), it.parts, it.source.inference) is None


@pytest.mark.parametrize(
    "overrides",
    [
        {"mismatch": ["top_p"], "mismatch.top_p.p": 0.99, "mismatch.target_kl": 1.0},
        {"mismatch": ["bf16_weights"], "mismatch.target_kl": 1e5},
        {"model": "tiny_moe", "mismatch": ["expert_flips"], "mismatch.target_kl": 10.0},
    ],
    ids=str,
)
def test_what_no_strength_reaches_is_refused(overrides, learner):
    with pytest.raises(OptionError, match=r"the closest is .* nats at .* times their strength") as caught:
        learner(**overrides).start_row()
    assert caught.value.field == "mismatch.target_kl"


def test_weights_that_are_gone_are_refused_too(learner):
    short = {"task.num_prompts": 2, "task.max_completion_length": 1}
    it = learner(mismatch=["logit_noise"], **{"mismatch.target_kl": 1e-3}, **short)
    with torch.no_grad():
        it.parts.model.get_output_embeddings().weight.fill_(math.nan)
    with pytest.raises(OptionError, match="the closest is nan nats"):
        it.start_row()


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        ({"mismatch": ["logit_noise"]}, -1e-3),
        ({"mismatch": ["logit_noise"]}, math.nan),
        ({"mismatch": ["logit_noise"]}, math.inf),
        ({}, 1e-3),
        ({"mismatch": ["logit_noise"], "mismatch.logit_noise.strength": 0.0}, 1e-3),
        ({"mismatch": ["stale_kv"]}, 1e-3),
        ({"mismatch": ["parity"]}, 1e-3),
        ({"mismatch": ["top_p"], "mismatch.top_p.keep_mask": True}, 1e-3),
    ],
    ids=str,
)
def test_targets_that_mean_nothing_are_refused(overrides, value, make_cell):
    with pytest.raises(OptionError) as caught:
        make_cell(**overrides, **{"mismatch.target_kl": value})
    assert caught.value.field == "mismatch.target_kl"


def test_a_continued_run_keeps_its_factor(make_cell, run_in, tmp_path, numbers, monkeypatch):
    cell = make_cell(**PLAIN, mismatch=["logit_noise"], **{"mismatch.target_kl": 1e-3})
    whole = run_in(tmp_path, cell, checkpoint_every=3)
    assert whole.rows[0]["mismatch_factor"] > 0
    assert {row["mismatch_factor"] for row in whole.rows[1:]} == {None}
    paths = CellPaths(tmp_path)
    lines = paths.steps.read_text().splitlines(keepends=True)
    paths.steps.write_text("".join(lines[:8]))
    paths.outcome.unlink()
    monkeypatch.setattr("stalefront.loop.calibrate", lambda *_: 1 / 0)
    again = run_in(tmp_path, cell, checkpoint_every=3, attempt=2)
    assert again.outcome["resumed_from_step"] == 6
    assert numbers(again.rows) == numbers(whole.rows)
