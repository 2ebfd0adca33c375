"""The verl fork of VCPO: token, sequence and geometric rules with bounds on old/μ itself, and the token veto."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, refuse
from stalefront.frameworks.verl import AGGREGATIONS, CLAMP_NATS, CORRECTION, FLOOR, clip
from stalefront.frameworks.verl import OPTIONS as UPSTREAM
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.parity import Case, GoldenFile, Number

Level = Literal["token", "sequence", "geometric"]
SHARED = (
    *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    *("loss_agg_mode", "loss_scale_factor", "norm_adv_by_std_in_grpo"),
)
OPTIONS = {
    **{name: UPSTREAM[name] for name in SHARED},
    "rollout_is": Option(Level | None, (f"{CORRECTION}.rollout_is",)),
    "rollout_is_threshold": Option(float, (f"{CORRECTION}.rollout_is_threshold",)),
    "rollout_rs": Option(Level | None, (f"{CORRECTION}.rollout_rs",)),
    "rollout_rs_threshold": Option(float | None, (f"{CORRECTION}.rollout_rs_threshold",)),
    "rollout_rs_threshold_lower": Option(float | None, (f"{CORRECTION}.rollout_rs_threshold_lower",)),
    "rollout_token_veto_threshold": Option(float | None, (f"{CORRECTION}.rollout_token_veto_threshold",)),
}


def compose(o: dict[str, Any]) -> Recipe:
    """Weights, then rejection, then the veto, all on the original mask; what they reject leaves denominators."""
    low, high = clip(o)
    scale = "group" if o["norm_adv_by_std_in_grpo"] else "none"
    fields = {"clamp_nats": CLAMP_NATS, "scale_rewards": scale, "dual_clip": o["clip_ratio_c"]}
    loss = entry("loss", "dapo", epsilon=low, epsilon_high=high, **fields)
    rejects = o["rollout_rs"] is not None or o["rollout_token_veto_threshold"] is not None
    shape = {"fixed_length": o["loss_scale_factor"]} if o["loss_agg_mode"] == "seq-mean-token-sum-norm" else {}
    reduction = entry(
        "reduction", AGGREGATIONS[o["loss_agg_mode"]], denominator="kept" if rejects else "valid", **shape
    )
    return recipe(loss, correction=[*weights(o), *rejection(o), *veto(o)], reduction=reduction)


def weights(o: dict[str, Any], anchor: str = "old/mu") -> list[Entry]:
    """`rollout_is`: weights truncated from above."""
    level, cap = o["rollout_is"], o["rollout_is_threshold"]
    if level is None:
        return []
    if level == "token":
        return [entry("correction", "token_tis", anchor=anchor, cap=cap, clamp_nats=CLAMP_NATS)]
    stem = "sequence_tis" if level == "sequence" else "geometric_tis"
    return [entry("correction", stem, anchor=anchor, cap=cap, floor=FLOOR)]


def rejection(o: dict[str, Any]) -> list[Entry]:
    """`rollout_rs`: keep what lies within the bounds."""
    level = o["rollout_rs"]
    if level is None:
        return []
    high = o["rollout_is_threshold"] if o["rollout_rs_threshold"] is None else o["rollout_rs_threshold"]
    if high <= 0:
        raise refuse("rollout_rs_threshold", high, "a number above 0")
    low = 1 / high if o["rollout_rs_threshold_lower"] is None else o["rollout_rs_threshold_lower"]
    band = {"anchor": "old/mu", "statistic": "ratio", "low": low, "high": high}
    if level == "token":
        return [entry("correction", "token_mask", clamp_nats=CLAMP_NATS, **band)]
    return [entry("correction", "sequence_mask", aggregate="sum" if level == "sequence" else "mean", **band)]


def veto(o: dict[str, Any]) -> list[Entry]:
    """`rollout_token_veto_threshold`: one token below it drops its sequence."""
    low = o["rollout_token_veto_threshold"]
    return [] if low is None else [entry("correction", "outlier_veto", anchor="old/mu", low=low, high=None)]


def case(file: GoldenFile) -> Case:
    """Golden files of the correction alone."""
    from stalefront.parity import Case

    compare: dict[str, Number] = {
        "rollout_is_weights": lambda e: e.weight_BT,
        "modified_response_mask": lambda e: e.kept_BT,
    }
    compare = {key: ours for key, ours in compare.items() if file.outputs.get(key) is not None}
    return Case(options=file.settings, compare=compare)


FRAMEWORK = Framework(
    name="verl_fork_vcpo",
    source="mit-han-lab/vcpo c7f030f0b772",
    options=OPTIONS,
    compose=compose,
    case=case,
    sections=(CORRECTION,),
    quirks=("Advantages are divided by σ + 1e-6; ours by σ + 1e-4.",),
)
