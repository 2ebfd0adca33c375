"""AReaL's options: an independent formula of rejection sampling on other settings, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from stalefront.choice import OptionError
from stalefront.frameworks import framework

AREAL = framework("areal")
RS = "rejection_sampling"
BOUNDS = {"ratio": (0.6, 1.9), "kl_k1": (-0.4, 0.5), "kl_k2": (None, 0.2), "kl_k3": (None, 0.25)}


def exp(value):
    """e^value in float32, as AReaL has it; torch's, since numpy's differs in the last bit."""
    return torch.tensor(value).float().exp().double().numpy()


def divergence(p, q):
    p, q = (np.clip(np.exp(v), 1e-8, 1 - 1e-8) for v in (p, q))
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def rejection(c, x):
    """Mask that is left and weight of every token."""
    m = x["mask"] > 0
    l = np.where(m, x["logp_old"] - x["logp_mu"], 0.0)  # noqa: E741
    low = -np.inf if c["lower"] is None else c["lower"]
    metric = {
        "ratio": l,
        "kl_k1": l,
        "kl_k2": l**2 / 2,
        "kl_k3": np.exp(-l) - 1 + l,
        "binary_kl": np.maximum(divergence(x["logp_old"], x["logp_mu"]), divergence(x["logp_mu"], x["logp_old"])),
    }[c["metric"]]
    log, weight = c["metric"] == "ratio", exp(l)
    if c["level"] == "sequence":
        n = np.maximum(m.sum(1, keepdims=True), 1)
        if log:
            weight = np.broadcast_to(exp(l.sum(1, keepdims=True) / n), l.shape)
        total = np.where(m, metric, 0.0).sum(1, keepdims=True)
        highest = np.where(m.any(1, keepdims=True), np.where(m, metric, -np.inf).max(1, keepdims=True), 0.0)
        metric = {"sum": total, "mean": total / n, "max": highest}[c["agg"]]
    value = exp(metric) if log else metric
    inside = np.broadcast_to((value >= low) & (value <= c["upper"]), l.shape)
    if c["action"] == "mask":
        return m & inside, weight
    clipped = np.clip(weight, max(low, 0.0), c["upper"])
    return m, np.where(inside, weight, clipped)


def reference(s, x):
    """Decoupled PPO with rejection sampling: loss, weights of what is left."""
    theta, old, a, m = (x[key] for key in ("logp_theta", "logp_old", "advantages", "mask"))
    left, weight = rejection(s[RS], x)
    r = np.exp(theta - old)
    if s["importance_sampling_level"] == "sequence":
        n = np.maximum(left.sum(1, keepdims=True), 1)
        r = np.exp(np.where(left, theta - old, 0).sum(1, keepdims=True) / n)
        a = np.where(left, a, 0).sum(1, keepdims=True) / n
    high = s["eps_clip"] if s["eps_clip_higher"] is None else s["eps_clip_higher"]
    loss = np.maximum(-r * a, -np.clip(r, 1 - s["eps_clip"], 1 + high) * a)
    if s["c_clip"] is not None:
        loss = np.minimum(loss, s["c_clip"] * np.abs(a))
    return np.where(left, loss * weight, 0).sum() / m.sum(), np.where(left, weight, 0.0), left


SETTINGS = [
    *itertools.product(("token",), ("mask",), (*BOUNDS, "binary_kl"), ("mean",)),
    *itertools.product(("sequence",), ("mask",), BOUNDS, ("mean", "sum", "max")),
    ("token", "clamp", "ratio", "mean"),
    ("sequence", "clamp", "ratio", "mean"),
    ("sequence", "clamp", "ratio", "sum"),
]


@pytest.mark.parametrize(("number", "setting"), list(enumerate(SETTINGS)), ids=lambda v: str(v))
def test_other_settings(wild, verdict, number, setting):
    level, action, metric, agg = setting
    low, high = BOUNDS.get(metric, (None, 0.1))
    rules = {"level": level, "action": action, "metric": metric, "agg": agg, "lower": low, "upper": high}
    s = {
        RS: rules,
        "eps_clip": 0.25,
        "eps_clip_higher": (None, 0.4)[number % 2],
        "c_clip": (None, 2.5)[number // 2 % 2],
    }
    s["importance_sampling_level"] = ("token", "sequence")[number // 3 % 2]
    x = wild(number)
    value, weight, left = reference(s, x)
    outputs = {"loss": value, "behave_imp_weight": weight, "behave_mask": left & (weight > 0)}
    assert verdict("areal__ppo_actor_loss_fn__decoupled_no_rs", s, x, outputs) == "equal"


def test_k3_is_that_of_the_inverse_ratio(wild):
    """AReaL's k3 of log-ratio l is e^(−l) − 1 + l: rare tokens are punished, not frequent ones."""
    made = AREAL.recipe(
        {"use_decoupled_loss": True, f"{RS}.level": "token", f"{RS}.metric": "kl_k3", f"{RS}.upper": 1.0}
    )
    assert [(one["choice"], one.get("statistic")) for one in made.correction] == [
        ("token_tis", None),
        ("token_mask", "inverse_k3"),
    ]


@pytest.mark.parametrize("budget", [0.01, 0.1, 1e-9])
def test_m2po_drops_the_largest_until_the_mean_is_below(wild, verdict, budget):
    x = wild(3)
    # Ties, which AReaL breaks by position.
    x["logp_mu"] = np.round(x["logp_mu"] * 8) / 8
    x["logp_old"] = np.minimum(np.round(x["logp_old"] * 8) / 8, 0)
    m = x["mask"] > 0
    square = ((x["logp_mu"] - x["logp_old"]) ** 2)[m]
    order = np.argsort(-square, kind="stable")
    means = np.array([square[order[k:]].mean() for k in range(len(order))])
    first = int(np.argmax(means < budget)) if (means < budget).any() else len(order) - 1
    keep = np.zeros(len(order), bool)
    keep[order[first:]] = True
    left = np.zeros_like(m)
    left[m] = keep
    assert 0 < keep.sum() < len(keep)
    name = "areal__apply_m2po_masking__thr004"
    assert verdict(name, {"m2_threshold": budget}, x, {"loss_mask": left}) == "equal"


def test_sapo_at_sequence_level(wild, verdict):
    x = wild(5)
    m = x["mask"]
    n = np.maximum(m.sum(1, keepdims=True), 1)
    r = np.exp(((x["logp_theta"] - x["logp_old"]) * m).sum(1, keepdims=True) / n)
    a = (x["advantages"] * m).sum(1, keepdims=True) / n
    tau = np.where(a > 0, 0.7, 1.4)
    loss = (-4 / tau / (1 + np.exp(-tau * (r - 1))) * a * m).sum() / m.sum()
    s = {"tau_pos": 0.7, "tau_neg": 1.4, "importance_sampling_level": "sequence"}
    assert verdict("areal__sapo_loss_fn__default", s, x, {"loss": loss}) == "equal"


@pytest.mark.parametrize(
    ("options", "anchor"),
    [({}, "theta/mu"), ({"recompute_logprob": True}, "theta/old"), ({"use_decoupled_loss": True}, "theta/old")],
)
def test_what_stands_under_the_ratio(options, anchor):
    assert AREAL.recipe(options).loss["anchor"] == anchor


def test_decoupled_without_rejection_sampling_is_noted():
    made = AREAL.recipe({"use_decoupled_loss": True})
    assert made.correction == ()
    assert "no weight" in made.notes[0]


def test_a3po_is_a_proximal_policy():
    made = AREAL.recipe({"use_decoupled_loss": True, "prox_logp_method": "loglinear"})
    assert (made.proximal["choice"], made.proximal["method"]) == ("a3po", "loglinear")


def test_tokens_that_m2po_masks_leave_the_divisor():
    made = AREAL.recipe({"use_decoupled_loss": True, "m2_threshold": 0.04})
    assert made.reduction["denominator"] == "kept"
    assert AREAL.recipe({}).reduction["denominator"] == "valid"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({RS: {"upper": 2.0}}, r"rejection_sampling\.upper = 2\.0 .* Set framework\.rejection_sampling\.level=token"),
        ({f"{RS}.level": "token"}, r"rejection_sampling\.level = 'token' .* null without use_decoupled_loss"),
        (
            {"use_decoupled_loss": True, RS: {"level": "token", "action": "clamp", "metric": "kl_k2"}},
            r"rejection_sampling\.metric = 'kl_k2' .* ratio with rejection_sampling\.action=clamp",
        ),
        (
            {"use_decoupled_loss": True, "m2_threshold": 0.04, RS: {"level": "token"}},
            r"m2_threshold = 0\.04 .* null with rejection_sampling\.action=mask",
        ),
        ({"use_sapo_loss": True, "use_decoupled_loss": True}, r"use_sapo_loss = True .* AReaL refuses it too"),
        ({"use_cispo_loss": True}, r"eps_clip_higher = None .* a number above 0 with use_cispo_loss"),
        ({"kl_ctl": 0.1}, r"here it is in the loss, as loss\.beta"),
        ({"prox_logp_method": "reuse_train_logp"}, r"Legal: one of recompute, loglinear, metrics"),
    ],
)
def test_what_it_refuses(options, text):
    with pytest.raises(OptionError, match=text):
        AREAL.recipe(options)


def test_a_section_that_is_null_says_nothing(tmp_path):
    from stalefront.commands.import_config import read_config

    path = tmp_path / "areal.yaml"
    path.write_text("actor:\n  eps_clip: 0.3\n  use_decoupled_loss: true\n  rejection_sampling: null\n")
    found = read_config(AREAL, path)
    assert found.changed == {"eps_clip": 0.3, "use_decoupled_loss": True}
    path.write_text("actor:\n  use_decoupled_loss: true\n  rejection_sampling: {level: token, upper: 2.0}\n")
    assert read_config(AREAL, path).recipe.correction[0]["high"] == 2.0
    path.write_text("actor:\n  use_decoupled_loss: true\n  rejection_sampling: {levl: token}\n")
    with pytest.raises(OptionError, match=r"Did you mean actor\.rejection_sampling\.level"):
        read_config(AREAL, path)
