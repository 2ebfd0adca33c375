"""The applied update: what is clipped, stepped and measured."""

import math

import pytest
import torch

from stalefront.optimizer import Optimizer
from stalefront.update import Updater, cosine, norm

PLAIN = {
    "kind": "sgd",
    "lr": 0.5,
    "warmup_steps": 0,
    "betas": None,
    "eps": None,
    "weight_decay": 0.0,
    "max_grad_norm": None,
    "grad_accum": 1,
}


class Point(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))


def apply(updater: Updater, model: Point, gradient: list[float], step: int, scale: float = 1.0):
    updater.zero_grad()
    model.x.grad = torch.tensor(gradient)
    return updater.apply(step, scale)


def updater(**options):
    model = Point()
    if options.get("kind") == "adamw":
        options = {"betas": [0.9, 0.95], "eps": 1e-8} | options
    return Updater(model, Optimizer.from_mapping(PLAIN | options)), model


def test_sgd_by_hand():
    up, model = updater()
    first = apply(up, model, [0.0, 2.0], 1)
    # θ: (3, 4) → (3, 3); ‖Δθ‖ = .5 · 2
    assert model.x.tolist() == [3.0, 3.0]
    assert (first.grad_norm_raw, first.grad_norm_applied, first.clip_factor) == (2.0, 2.0, 1.0)
    assert (first.update_norm, first.dist_from_start) == (1.0, 1.0)
    assert first.param_norm == pytest.approx(math.sqrt(18))
    assert first.cos_grad is None
    second = apply(up, model, [3.0, 4.0], 2)
    # cos((3, 4), (0, 2)) = 8 / (5 · 2); Δθ = −(1.5, 2): the same angle
    assert second.cos_grad == pytest.approx(0.8)
    assert second.cos_update == pytest.approx(0.8)
    assert second.dist_from_start == pytest.approx(math.hypot(1.5, 3.0))


def test_clipping_is_torchs_and_the_cosine_is_of_the_clipped_gradient():
    up, model = updater(max_grad_norm=1.0)
    got = apply(up, model, [3.0, 4.0], 1)
    assert got.grad_norm_raw == 5.0
    assert got.grad_norm_applied == pytest.approx(1.0, abs=1e-6)
    assert got.clip_factor == pytest.approx(0.2, abs=1e-6)
    assert got.update_norm == pytest.approx(0.5, abs=1e-6)
    small = apply(up, model, [0.3, 0.4], 2)
    assert small.clip_factor == 1.0
    assert small.grad_norm_applied == pytest.approx(0.5)


def test_normalised_sgd_steps_by_the_rate_whatever_the_gradient():
    up, model = updater(kind="nsgd")
    for step, gradient in enumerate(([3.0, 4.0], [3e-6, 4e-6], [300.0, -400.0]), start=1):
        got = apply(up, model, gradient, step)
        assert got.update_norm == pytest.approx(0.5, rel=1e-5)
        assert got.clip_factor == pytest.approx(1 / got.grad_norm_raw)
    still = apply(up, model, [0.0, 0.0], 4)
    assert still.update_norm == 0.0


def test_warm_up_is_linear_and_then_constant():
    options = Optimizer.from_mapping(PLAIN | {"warmup_steps": 4, "lr": 1.0})
    assert [options.lr_at(t) for t in (1, 2, 4, 5, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    up, model = updater(warmup_steps=4, lr=1.0)
    got = apply(up, model, [1.0, 0.0], 1, scale=0.5)
    assert (got.lr_asked, got.lr_scale, got.lr_applied) == (0.25, 0.5, 0.125)
    assert got.update_norm == pytest.approx(0.125)


def test_adamw_is_torchs():
    up, model = updater(kind="adamw", lr=0.1, weight_decay=0.1)
    other = Point()
    reference = torch.optim.AdamW(other.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step, gradient in enumerate(([1.0, 2.0], [-1.0, 0.5], [0.0, 3.0]), start=1):
        apply(up, model, gradient, step)
        other.x.grad = torch.tensor(gradient)
        reference.step()
        assert torch.allclose(model.x, other.x, rtol=1e-6)


def test_a_non_finite_gradient_is_applied_and_seen():
    up, model = updater(max_grad_norm=1.0)
    assert apply(up, model, [1.0, 0.0], 1).finite
    got = apply(up, model, [math.inf, 1.0], 2)
    assert got.grad_norm_raw == math.inf
    assert math.isnan(got.grad_norm_applied)
    assert not got.finite
    assert math.isnan(got.dist_from_start)


def test_the_angle_with_nothing_is_nan():
    assert math.isnan(cosine(torch.zeros(3), torch.ones(3)))
    assert cosine(torch.ones(3), -torch.ones(3)) == pytest.approx(-1)


def test_state_goes_on_bit_for_bit():
    gradients = [[1.0, 2.0], [-1.0, 0.5], [0.5, 3.0], [2.0, 2.0]]
    whole, model = updater(kind="adamw")
    expected = [apply(whole, model, g, t) for t, g in enumerate(gradients, start=1)]
    first, before = updater(kind="adamw")
    for t, g in enumerate(gradients[:2], start=1):
        apply(first, before, g, t)
    second, after = updater(kind="adamw")
    after.load_state_dict(before.state_dict())
    second.load_state_dict(first.state_dict())
    assert [apply(second, after, g, t) for t, g in enumerate(gradients[2:], start=3)] == expected[2:]


def test_lengths_and_angles_of_a_large_model():
    # A float32 sum over so many entries loses a tenth of a percent and more, and gives cosines above 1.
    vector = torch.full((40_000_000,), 1e-3)
    vector[::2] *= -3
    # ‖v‖² = 2e7 · (1 + 9) · 1e-6 = 200, up to the rounding of the entries themselves
    assert norm(vector) == pytest.approx(math.sqrt(200), rel=1e-7)
    assert abs(cosine(vector, vector) - 1) < 1e-12
    assert abs(cosine(vector, -vector) + 1) < 1e-12
