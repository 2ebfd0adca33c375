"""prime-rl: `default_loss_fn` and `ipo_loss_fn` of `trainer/rl/loss.py`, as of August 2026."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared, refuse
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.parity import Case, GoldenFile

# Every loss and mask is on θ/μ; the trainer's own old log-probs are not used.
ANCHOR = "theta/mu"

KINDS: dict[str, Any] = {
    "type": Literal["default", "ipo"],
    "dppo_mask_low": float,
    "dppo_mask_high": float,
    "ipo_threshold": float,
    "adv_tau": float,
    "kl_tau": float,
    "rl_scale": float | None,
}
OPTIONS = {name: Option(kind, (f"trainer.loss.{name}", f"loss.{name}")) for name, kind in KINDS.items()}

NOT_SHARED = {
    "teacher_tau": Unshared(
        "There is no teacher here; set it to 0.",
        off=(None, 0, 0.0),
        paths=("trainer.loss.teacher_tau", "loss.teacher_tau"),
    ),
}

QUIRKS = (
    "A token whose advantage is 0 counts as masked by the lower bound in prime-rl's metrics; its loss is 0 either way, "
    "and it is not counted here.",
)


def compose(o: dict[str, Any]) -> Recipe:
    """A masked ratio with a squared log-ratio, summed and divided by a number of tokens."""
    tau = o["kl_tau"] / check_scale(o)
    if o["type"] == "ipo":
        loss = entry("loss", "ipo", epsilon=o["ipo_threshold"], kl_tau=tau, value_cap=None, anchor=ANCHOR)
    else:
        deltas = {"delta_low": o["dppo_mask_low"], "delta_high": o["dppo_mask_high"]}
        loss = entry("loss", "dppo", divergence="tv", kl_tau=tau, anchor=ANCHOR, **deltas)
    return recipe(loss, reduction=reduction(o))


def check_scale(o: dict[str, Any]) -> float:
    """`adv_tau`, which multiplies the whole loss once `kl_tau` is divided by it."""
    factor: float = o["adv_tau"]
    if factor <= 0:
        raise refuse("adv_tau", factor, "a number above 0")
    if factor != 1 and o["rl_scale"] is None:
        way_out = (
            "It multiplies the loss: multiply optimizer.lr by it, or give rl_scale, the number of tokens divided by."
        )
        raise refuse("adv_tau", factor, "1 while rl_scale is null", way_out)
    if o["rl_scale"] is not None and o["rl_scale"] <= 0:
        raise refuse("rl_scale", o["rl_scale"], "a number above 0, or null")
    return factor


def reduction(o: dict[str, Any]) -> Entry:
    """Token mean, or the sum divided by a given number."""
    if o["rl_scale"] is None:
        return entry("reduction", "token_mean")
    return entry("reduction", "token_sum", divisor=o["rl_scale"] / o["adv_tau"])


def case(file: GoldenFile) -> Case:
    """The function's name is the type."""
    from stalefront.parity import Case

    return Case({**file.settings, "type": "ipo" if "ipo" in file.function else "default"})


FRAMEWORK = Framework(
    "prime_rl",
    "PrimeIntellect-ai/prime-rl 559b44772e47",
    OPTIONS,
    compose,
    case,
    sections=("trainer.loss",),
    not_shared=NOT_SHARED,
    quirks=QUIRKS,
)
