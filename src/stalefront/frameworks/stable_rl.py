"""Stable-RL (DPPO): −sg[min(θ/μ, c)] A log θ on the tokens that a mask leaves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option
from stalefront.frameworks.verl import ACTOR, AGGREGATIONS, CLAMP_NATS
from stalefront.recipe import Recipe, entry, recipe

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.parity import Case, Evaluated, GoldenFile

DIVERGENCE = {"dppo_binary_tv": "tv", "dppo_binary_kl": "kl", "ppo": "ratio"}
Mode = Literal[
    "dppo_binary_tv",
    "dppo_binary_tv_recompute",
    "dppo_binary_kl",
    "dppo_binary_kl_recompute",
    "ppo",
    "ppo_recompute",
    "pg_no_mask",
]
OPTIONS = {
    "loss_mode": Option(Mode, (f"{ACTOR}.policy_loss.loss_mode",)),
    "clip_ratio_low": Option(float, (f"{ACTOR}.clip_ratio_low",)),
    "clip_ratio_high": Option(float, (f"{ACTOR}.clip_ratio_high",)),
    "clip_ratio_c": Option(float, (f"{ACTOR}.clip_ratio_c",)),
    "loss_agg_mode": Option(
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
        (f"{ACTOR}.loss_agg_mode",),
    ),
    "norm_adv_by_std_in_grpo": Option(bool, ("algorithm.norm_adv_by_std_in_grpo",)),
}


def compose(o: dict[str, Any]) -> Recipe:
    """One loss; the modes differ in its mask."""
    mode, scale = o["loss_mode"], "group" if o["norm_adv_by_std_in_grpo"] else "none"
    mask = {"divergence": "tv", "delta_low": math.inf, "delta_high": math.inf}
    if mode != "pg_no_mask":
        divergence = DIVERGENCE[mode.removesuffix("_recompute")]
        mask = {"divergence": divergence, "delta_low": o["clip_ratio_low"], "delta_high": o["clip_ratio_high"]}
    base = "old" if mode.endswith("_recompute") else "mu"
    weight = {"anchor": "theta/mu", "clamp_nats": CLAMP_NATS, "objective": "logp", "cap": o["clip_ratio_c"]}
    loss = entry("loss", "dppo", mask_base=base, scale_rewards=scale, **weight, **mask)
    return recipe(loss, reduction=entry("reduction", AGGREGATIONS[o["loss_agg_mode"]]))


def case(file: GoldenFile) -> Case:
    """Golden files of the loss, with the mask that it used."""
    from stalefront.parity import Case

    return Case(options=file.settings, compare={"valid_mask": valid_BT})


def valid_BT(found: Evaluated) -> Tensor:
    """The mask: where A = 0 it takes the side of A < 0, which changes no loss."""
    import torch

    from stalefront.loss.dppo import DPPO

    loss = found.recipe.parts().loss
    assert isinstance(loss, DPPO)
    inputs = found.inputs
    side = torch.where(inputs.advantage_B > 0, 1.0, -1.0).to(inputs.advantage_B.dtype)
    low, high = loss.outside(replace(inputs, advantage_B=side))
    return inputs.mask_BT & ~(low | high)


FRAMEWORK = Framework(
    name="stable_rl",
    source="sail-sg/Stable-RL c6af1d119c0f",
    options=OPTIONS,
    compose=compose,
    case=case,
    sections=(f"{ACTOR}.policy_loss",),
    quirks=("Masks on the divergence of the top k tokens need more than the sampled token's log-prob: not offered.",),
)
