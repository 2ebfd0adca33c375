"""prime-rl: the losses `ipo`, `icepop`, `ppo` and `cispo` of `trainer/rl/loss.py`, as of late September 2026."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared, prime_rl
from stalefront.frameworks.prime_rl import ANCHOR
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.parity import Case, GoldenFile

# Bounds of the ratio where none are given; ipo has none.
BOUNDS = {"icepop": (0.2, 5.0), "ppo": (0.8, 1.2), "cispo": (0.0, 5.0), "ipo": (0.0, math.inf)}

KINDS: dict[str, Any] = {
    "type": Literal["ipo", "icepop", "ppo", "cispo"],
    "eps": float,
    "ratio_low": float | None,
    "ratio_high": float | None,
    "max_importance_ratio": float,
    "adv_tau": float,
    "rl_scale": float | None,
}
OPTIONS = {name: Option(kind, (f"trainer.loss.{name}", f"loss.{name}")) for name, kind in KINDS.items()}

NOT_SHARED = {
    "score_centering": Unshared(
        "It needs the log-probs of every token that could have been sampled; set it to false.",
        paths=("trainer.loss.score_centering", "loss.score_centering"),
    ),
}

QUIRKS = ("Weights of single tokens (loss_weights) are 1 here.",)


def compose(o: dict[str, Any]) -> Recipe:
    """A ratio θ/μ that is masked, clipped or a weight, summed and divided by a number of tokens."""
    prime_rl.check_scale(o)
    return recipe(_loss(o), reduction=prime_rl.reduction(o))


def _loss(o: dict[str, Any]) -> Entry:
    kind, cap = o["type"], o["max_importance_ratio"]
    low, high = (
        usual if o[name] is None else o[name]
        for name, usual in zip(("ratio_low", "ratio_high"), BOUNDS[kind], strict=True)
    )
    if kind == "ipo":
        return entry("loss", "ipo", epsilon=o["eps"], kl_tau=0.0, value_cap=cap, anchor=ANCHOR)
    if kind == "icepop":
        return entry("loss", "icepop", low=low, high=high, anchor=ANCHOR)
    if kind == "cispo":
        return entry("loss", "cispo", floor=low, epsilon_high=high, anchor=ANCHOR)
    return entry("loss", "grpo", epsilon=1 - low, epsilon_high=high - 1, value_cap=cap, anchor=ANCHOR)


def case(file: GoldenFile) -> Case:
    """The class's name is the type: IPOLoss, IcePopLoss, PPOLoss, CISPOLoss."""
    from stalefront.parity import Case

    return Case({**file.settings, "type": file.function.removesuffix("Loss").lower()})


FRAMEWORK = Framework(
    "prime_rl_tip",
    "PrimeIntellect-ai/prime-rl, after 2026-09-18",
    OPTIONS,
    compose,
    case,
    sections=("trainer.loss",),
    not_shared=NOT_SHARED,
    quirks=QUIRKS,
)
