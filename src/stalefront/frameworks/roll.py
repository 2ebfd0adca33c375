"""ROLL: policy-gradient variants of its RLVR pipeline, and the train-infer correction (weights and filters)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared, refuse
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.batch import LossInputs
    from stalefront.parity import Case, GoldenFile, Number

CORRECTION = "train_infer_correction"
WEIGHT = f"{CORRECTION}.is_weight"
AGGREGATIONS = {
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "token-mean": "token_mean",
}
WEIGHTS = {
    "token": "token_tis",
    "segment": "segment_tis",
    "geometric": "geometric_tis",
    "sequence": "sequence_tis",
}
FILTER_DEFAULTS = {
    **{"enabled": False, "agg_type": "token", "ratio_enabled": False, "ratio_low": 0.8, "ratio_high": 1.2},
    **{"diff_enabled": False, "diff_low": -0.2, "diff_high": 0.2},
}
WORKER = "actor_train"

OPTIONS = {
    "pg_variant": Option(
        Literal["vanilla", "ppo", "tis", "topr", "cispo", "kimi15"], (f"{WORKER}.pg_variant", "pg_variant")
    ),
    **{name: Option(float) for name in ("pg_clip", "pg_clip_low", "pg_clip_high")},
    **{name: Option(bool) for name in ("use_pg_clip_range", "dual_clip_loss", "use_kl_loss")},
    **{
        name: Option(kind, (f"{WORKER}.{name}", name))
        for name, kind in {
            **{"tis_lower_bound": float, "tis_upper_bound": float},
            **{"topr_positive_weight": float, "topr_negative_weight": float},
            **{"cispo_epsilon_low": float, "cispo_epsilon_high": float, "cispo_use_unified_mask": bool},
            **{"kimi15_tau": float},
        }.items()
    },
    "loss_agg_mode": Option(Literal["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"]),
    "kl_loss_coef": Option(float),
    f"{WEIGHT}.enabled": Option(bool),
    f"{WEIGHT}.weight_type": Option(Literal["token", "segment", "geometric", "sequence"]),
    f"{WEIGHT}.lower_bound": Option(float),
    f"{WEIGHT}.upper_bound": Option(float),
    f"{WEIGHT}.detach": Option(bool),
    f"{CORRECTION}.filters": Option(tuple[dict[str, Any], ...]),
}
NOT_SHARED = {
    "entropy_loss_coef": Unshared("There is no entropy bonus.", (0, 0.0)),
    "adv_estimator": Unshared("Advantages here are relative to the group.", ("grpo",)),
    "add_token_level_kl": Unshared("A KL penalty inside the reward is not offered: use use_kl_loss.", (False,)),
    "use_topr_neg_loss_coef": Unshared("Extra loss terms are not offered: use pg_variant=topr.", (0, 0.0)),
    "postive_loss_coef": Unshared("A supervised term on positive samples is not offered.", (0, 0.0)),
    "importance_sampling": Unshared("Its sequence-level PPO ratio is not offered: use framework=verl.", ("token",)),
}


def compose(o: dict[str, Any]) -> Recipe:
    """A loss on θ/old, weights and filters on old/μ; filtered tokens leave the loss and its denominators."""
    filters = [one for given in o[f"{CORRECTION}.filters"] for one in filter_rules(given)]
    stems = [one["choice"] for one in filters]
    if len(set(stems)) < len(stems):
        legal = "at most one token rule and one sequence rule among all filters"
        raise refuse(f"{CORRECTION}.filters", list(o[f"{CORRECTION}.filters"]), legal, "A rule stands once in a list.")
    kept = "kept" if filters else "valid"
    added = {"epsilon": 1e-8, "epsilon_on": "sequences"}
    reduction = entry("reduction", AGGREGATIONS[o["loss_agg_mode"]], denominator=kept, **added)
    ignores = o["loss_agg_mode"] == "token-mean" and filters
    notes = ["ROLL's token-mean leaves out its mask, so that its filters have no effect there; here they act"]
    correction = [*weights(o), *filters]
    loss = LOSSES[o["pg_variant"]](o)
    return recipe(loss, correction=correction, reduction=reduction, notes=notes if ignores else ())


def common(o: dict[str, Any]) -> dict[str, Any]:
    """Fields that every loss takes."""
    return {"beta": o["kl_loss_coef"] if o["use_kl_loss"] else 0.0, "use_bias_correction_kl": False}


def _vanilla(o: dict[str, Any]) -> Entry:
    return entry("loss", "reinforce", **common(o))


def _ppo(o: dict[str, Any]) -> Entry:
    low, high = (o["pg_clip_low"], o["pg_clip_high"]) if o["use_pg_clip_range"] else (o["pg_clip"], o["pg_clip"])
    dual = 1 + 2 * o["pg_clip"] if o["dual_clip_loss"] else None
    return entry("loss", "grpo", epsilon=low, epsilon_high=high, dual_clip=dual, **common(o))


def _tis(o: dict[str, Any]) -> Entry:
    bounds = {"floor": o["tis_lower_bound"], "cap": o["tis_upper_bound"]}
    return entry("loss", "reinforce_clamp", anchor="theta/old", **bounds, **common(o))


def _topr(o: dict[str, Any]) -> Entry:
    parts = {"positive_weight": o["topr_positive_weight"], "negative_weight": o["topr_negative_weight"]}
    return entry("loss", "topr", anchor="theta/old", **parts, **common(o))


def _cispo(o: dict[str, Any]) -> Entry:
    bounds = {"floor": 1 - o["cispo_epsilon_low"], "epsilon_high": 1 + o["cispo_epsilon_high"]}
    return entry("loss", "cispo", ppo_mask=o["cispo_use_unified_mask"], **bounds, **common(o))


def _kimi15(o: dict[str, Any]) -> Entry:
    return entry("loss", "kimi", tau=o["kimi15_tau"], **common(o))


LOSSES: dict[str, Callable[[dict[str, Any]], Entry]] = {
    "vanilla": _vanilla,
    "ppo": _ppo,
    "tis": _tis,
    "topr": _topr,
    "cispo": _cispo,
    "kimi15": _kimi15,
}


def weights(o: dict[str, Any]) -> list[Entry]:
    """`is_weight`: clamped weights of tokens, turns, geometric means or whole sequences."""
    if not o[f"{WEIGHT}.enabled"]:
        return []
    if not o[f"{WEIGHT}.detach"]:
        raise refuse(f"{WEIGHT}.detach", False, "true", "Weights here carry no gradient.")
    bounds = {"cap": o[f"{WEIGHT}.upper_bound"], "floor": o[f"{WEIGHT}.lower_bound"]}
    return [entry("correction", WEIGHTS[o[f"{WEIGHT}.weight_type"]], anchor="old/mu", **bounds)]


def filter_rules(given: Mapping[str, Any]) -> list[Entry]:
    """Rules of one filter: on the ratio, on the difference of probabilities, or on both."""
    for key in given.keys() - FILTER_DEFAULTS.keys():
        legal = f"filters with {', '.join(FILTER_DEFAULTS)}"
        raise refuse(f"{CORRECTION}.filters", {key: given[key]}, legal)
    f = {**FILTER_DEFAULTS, **given}
    if not f["enabled"]:
        return []
    aggregates = {"token": None, "geometric": "mean", "sequence": "sum"}
    if f["agg_type"] not in aggregates:
        raise refuse(f"{CORRECTION}.filters", f["agg_type"], "agg_type token, geometric or sequence")
    aggregate = aggregates[f["agg_type"]]
    kinds = {"ratio": "ratio", "diff": "difference"}
    if aggregate is not None and f["diff_enabled"]:
        legal = "diff_enabled with agg_type=token alone"
        raise refuse(f"{CORRECTION}.filters", dict(given), legal, "Differences of whole sequences are not shared.")
    shape = {} if aggregate is None else {"aggregate": aggregate}
    stem = "token_mask" if aggregate is None else "sequence_mask"
    return [
        entry(
            "correction", stem, anchor="old/mu", statistic=kind, low=f[f"{name}_low"], high=f[f"{name}_high"], **shape
        )
        for name, kind in kinds.items()
        if f[f"{name}_enabled"]
    ]


def case(file: GoldenFile) -> Case:
    """Golden files: the correction alone, or a loss (`pg_…`) with one filter, weights and scores of its harness."""
    from stalefront.parity import Case, Declined, number

    settings = dict(file.settings)
    scores = settings.pop("scores", None)
    one = settings.pop("filter", None)
    filters = settings.pop("filters", [one] if one else [])
    correction = {"filters": filters, "is_weight": settings.pop("is_weight", None) or {}}
    if settings.get("loss_agg_mode") == "token-mean":
        raise Declined("ROLL's token-mean leaves out its mask, so that padding and filtered tokens enter the loss")
    if file.function.startswith("pg_"):
        settings["pg_variant"] = file.function.removeprefix("pg_")

    def with_scores(inputs: LossInputs) -> LossInputs:
        return inputs if scores is None else replace(inputs, reward_B=number(scores))

    compare: dict[str, Number] = {
        "is_weight": lambda e: e.weight_BT,
        "filter_mask": lambda e: e.weights.keep_BT,
        "final_mask": lambda e: e.kept_BT,
    }
    compare = {key: ours for key, ours in compare.items() if file.outputs.get(key) is not None}
    return Case(options=settings | {CORRECTION: correction}, inputs=with_scores, compare=compare)


FRAMEWORK = Framework(
    name="roll",
    source="alibaba/ROLL 8eb27cc2dc34",
    options=OPTIONS,
    compose=compose,
    case=case,
    sections=(CORRECTION,),
    not_shared=NOT_SHARED,
    quirks=(
        "token-mean leaves out its mask, so that filters have no effect and padding enters the loss; ours masks.",
        "seq-mean-token-sum-norm divides by the padded width alone and not by the number of sequences: not offered.",
    ),
)
