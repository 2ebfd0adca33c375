"""M2PO, the authors' own code: clip bounds solved from a second-moment budget, a micro-batch at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option
from stalefront.frameworks.verl import ACTOR, AGGREGATIONS
from stalefront.recipe import Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.parity import Case, GoldenFile

OPTIONS = {
    "M2_budget": Option(float, (f"{ACTOR}.M2_budget",)),
    "miniclip_low": Option(float | None, (f"{ACTOR}.miniclip_low",)),
    "miniclip_high": Option(float | None, (f"{ACTOR}.miniclip_high",)),
    "loss_agg_mode": Option(
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
        (f"{ACTOR}.loss_agg_mode",),
    ),
    "norm_adv_by_std_in_grpo": Option(bool, ("algorithm.norm_adv_by_std_in_grpo",)),
    "use_rollout_log_probs": Option(bool, (f"{ACTOR}.use_rollout_log_probs",)),
}


def compose(o: dict[str, Any]) -> Recipe:
    """One loss."""
    scale = "group" if o["norm_adv_by_std_in_grpo"] else "none"
    bounds = {"budget": o["M2_budget"], "miniclip_low": o["miniclip_low"], "miniclip_high": o["miniclip_high"]}
    anchor = "theta/mu" if o["use_rollout_log_probs"] else "theta/old"
    loss = entry("loss", "m2po", anchor=anchor, scale_rewards=scale, **bounds)
    return recipe(loss, reduction=entry("reduction", AGGREGATIONS[o["loss_agg_mode"]]))


def case(file: GoldenFile) -> Case:
    """Golden files of the loss; `behaviour` says what its harness passed as old."""
    from stalefront.parity import Case

    settings = dict(file.settings)
    is_mu = settings.pop("behaviour", "mu") == "mu"
    return Case(options=settings | {"use_rollout_log_probs": is_mu})


FRAMEWORK = Framework(
    name="m2po",
    source="Infini-AI-Lab/M2PO af54a3e8feff",
    options=OPTIONS,
    compose=compose,
    case=case,
    quirks=(
        "Its solver returns one number where two are unpacked when no token is harmful or none exceeds the budget, "
        "and then fails; ours leaves the ratio unclipped.",
    ),
)
