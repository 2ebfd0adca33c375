"""DPPO: hand-computed values, its two objectives, PPO's clip as a mask, and four frameworks' numbers."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError


@pytest.mark.parametrize(
    ("options", "token_loss", "slopes"),
    [
        # p_θ − p_μ = [.184, −.135], [−.368, 0, .303] as in IPO's golden. Out: the first token (A > 0, rose by more than
        # .15) and the third (A < 0, fell); the others move against A. −A r m.
        ({"delta_low": 0.15, "delta_high": 0.15}, [[0, -0.5, 0], [0, 2, 4]], [[0, -0.5, 0], [0, 2, 4]]),
        # −sg[min(r, 1.5)] A log θ m.
        (
            {"delta_low": 0.15, "delta_high": 0.15, "objective": "logp", "cap": 1.5},
            [[0, 1, 0], [0, -6, -1.5]],
            [[0, -0.5, 0], [0, 2, 3]],
        ),
        # The same cap on the value of the other objective.
        ({"delta_low": 0.15, "delta_high": 0.15, "cap": 1.5}, [[0, -0.5, 0], [0, 2, 3]], [[0, -0.5, 0], [0, 2, 3]]),
        # Bernoulli KL of p_μ = .184 from p_θ = .368: .184 ln ½ + .816 ln(.816/.632) = .081; of .736 from .368:
        # .736 ln 2 + .264 ln(.264/.632) = .280. Between them .2 keeps the first and drops the third.
        (
            {"divergence": "kl", "delta_low": 0.2, "delta_high": 0.2},
            [[-2, -0.5, 0], [0, 2, 4]],
            [[-2, -0.5, 0], [0, 2, 4]],
        ),
    ],
)
def test_golden(options, token_loss, slopes, make_loss, hand_batch, grade):
    graded = grade(make_loss("dppo", **options), hand_batch())
    value, expected = (torch.tensor(x, dtype=torch.float64) / 5 for x in (token_loss, slopes))
    assert graded.loss == pytest.approx(float(value.sum()), rel=1e-6)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


def test_the_objectives_have_one_gradient(make_loss, random_inputs, grade):
    inputs = random_inputs(spread=3)
    for cap in (None, 1.2, 0.5):
        one, other = (grade(make_loss("dppo", objective=o, cap=cap), inputs) for o in ("ratio", "logp"))
        torch.testing.assert_close(one.grad_BT, other.grad_BT)


@pytest.mark.parametrize("options", [{"cap": 0.5}, {"cap": 0.5, "objective": "logp"}])
def test_a_small_cap_scales_the_on_policy_gradient(options, make_loss, random_inputs, grade):
    inputs, loss = random_inputs(spread=0), make_loss("dppo", **options)
    assert (loss.on_policy, loss.on_policy_scale) == ("scaled", 0.5)
    torch.testing.assert_close(grade(loss, inputs).grad_BT, 0.5 * grade(make_loss("dppo"), inputs).grad_BT)


def test_ratio_as_divergence_is_ppos_clip(make_loss, random_inputs, grade):
    # Where PPO's clip does not stop the gradient, its gradient is that of −A r.
    inputs = random_inputs(spread=2)
    options = {"divergence": "ratio", "delta_low": 0.2, "delta_high": 0.3, "mask_base": "old", "anchor": "theta/old"}
    one, other = grade(make_loss("dppo", **options), inputs), grade(make_loss("dapo", epsilon_high=0.3), inputs)
    torch.testing.assert_close(one.grad_BT, other.grad_BT)
    assert torch.equal(one.value.clip_low_BT, other.value.clip_low_BT)
    assert torch.equal(one.value.clip_high_BT, other.value.clip_high_BT)


def test_a_wide_region_is_importance_sampling(make_loss, random_inputs, grade):
    inputs = random_inputs(spread=3)
    one, other = grade(make_loss("dppo", delta_low=1, delta_high=1), inputs), grade(make_loss("importance"), inputs)
    assert one.loss == other.loss
    assert torch.equal(one.grad_BT, other.grad_BT)


def radius(delta: float, high: float | None = None) -> dict[str, float]:
    return {"delta_low": delta, "delta_high": delta if high is None else high}


LOGP = {"objective": "logp", "cap": 1e4}
STABLE = "stable_rl__compute_policy_loss_with_mask__"


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("verl__dppo_tv__mu_c10000", radius(0.15) | LOGP | {"clamp_nats": 20}),
        ("verl__dppo_tv__mu_edge", LOGP | {"clamp_nats": 20}),
        (
            "verl__dppo_tv__old_c3",
            radius(0.15) | {"objective": "logp", "cap": 3, "anchor": "theta/old", "mask_base": "old"},
        ),
        ("verl__dppo_kl__mu_c10000", radius(0.05) | LOGP | {"divergence": "kl"}),
        (f"{STABLE}dppo_binary_kl_c10", radius(0.05) | {"divergence": "kl", "objective": "logp", "cap": 10}),
        (f"{STABLE}dppo_binary_tv_c10", radius(0.15) | {"objective": "logp", "cap": 10}),
        (f"{STABLE}dppo_binary_tv_recompute_c10", radius(0.15) | {"objective": "logp", "cap": 10, "mask_base": "old"}),
        (f"{STABLE}ppo_c10", radius(0.2, 0.28) | {"divergence": "ratio", "objective": "logp", "cap": 10}),
        (
            f"{STABLE}ppo_recompute_c10",
            radius(0.2, 0.28) | {"divergence": "ratio", "objective": "logp", "cap": 10, "mask_base": "old"},
        ),
        ("skyrl__dppo_policy_loss__binary_tv02", {"rtol": 5e-8}),
        ("skyrl__dppo_policy_loss__binary_kl005", radius(0.05) | {"divergence": "kl", "rtol": 5e-8}),
        ("prime_rl__default_loss_fn__dppo02_kl0", {}),
        ("prime_rl__default_loss_fn__dppo02_kl1e-3", {"kl_tau": 1e-3}),
        ("prime_rl__default_loss_fn__edge", {"kl_tau": 1e-3}),
    ],
)
def test_frameworks(file, options, agrees):
    agrees(file, "dppo", **options)


@pytest.mark.parametrize(("field", "value"), [("delta_low", -1), ("delta_high", math.nan), ("cap", 0), ("kl_tau", -1)])
def test_refused(make_loss, field, value):
    with pytest.raises(OptionError, match=f"loss.{field}"):
        make_loss("dppo", **{field: value})
