"""SkyRL: `ppo_utils.py` (losses, reductions) and `off_policy_correction_utils.py` (masks and weights on old/μ)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared, refuse
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.batch import LossInputs
    from stalefront.parity import Case, GoldenFile

LOSSES = ("regular", "dual_clip", "gspo", "sapo", "cispo", "rollout_is", "dppo", "importance_sampling")
# Losses whose ratio is formed in float32.
SINGLE = ("regular", "dual_clip", "cispo", "rollout_is", "dppo")
# Log-ratios are held within ±20 before exp.
CLAMP = 20.0
REDUCTIONS = {
    "token_mean": "token_mean",
    "token_mean_legacy": "micro_batch_mean",
    "sequence_mean": "sequence_mean",
    "prompt_mean": "prompt_mean",
    "seq_mean_token_sum_norm": "constant",
}


def _at(name: str) -> tuple[str, ...]:
    return (f"trainer.algorithm.{name}",)


KINDS: dict[str, Any] = {
    "policy_loss_type": Literal[
        "regular", "dual_clip", "gspo", "sapo", "cispo", "rollout_is", "dppo", "importance_sampling"
    ],
    "loss_reduction": Literal[
        "token_mean", "token_mean_legacy", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm"
    ],
    "max_seq_len": int | None,
    "eps_clip_low": float,
    "eps_clip_high": float,
    "clip_ratio_c": float,
    "use_kl_loss": bool,
    "kl_loss_coef": float,
    "kl_estimator_type": Literal["k3"],
    "grpo_norm_by_std": bool,
    "off_policy_correction.tis_ratio_type": Literal["token", "sequence"] | None,
    "off_policy_correction.token_tis_ratio_clip_high": float,
    "off_policy_correction.sequence_tis_ratio_clip_high": float,
    "off_policy_correction.sequence_mask_metric": Literal["geometric", "product"] | None,
    "off_policy_correction.geo_mask_high": float,
    "off_policy_correction.geo_mask_low": float,
    "off_policy_correction.product_mask_high": float,
    "off_policy_correction.product_mask_low": float,
    "off_policy_correction.outlier_token_is_threshold_low": float | None,
    "off_policy_correction.outlier_token_is_threshold_high": float | None,
    "off_policy_correction.token_mask_is_threshold_low": float | None,
    "off_policy_correction.token_mask_is_threshold_high": float | None,
    "cispo.cispo_eps_clip_low": float,
    "cispo.cispo_eps_clip_high": float,
    "cispo.cispo_anchor": Literal["old", "rollout"],
    "dppo.dppo_type": Literal["binary_tv", "binary_kl"],
    "dppo.delta_low": float,
    "dppo.delta_high": float,
    "sapo.tau_pos": float,
    "sapo.tau_neg": float,
}
OPTIONS = {name: Option(kind, _at(name)) for name, kind in KINDS.items()}

NOT_SHARED = {
    "use_kl_in_reward": Unshared(
        "Rewards hold no KL term here; use_kl_loss has it in the loss.", paths=_at("use_kl_in_reward")
    ),
    "use_entropy_loss": Unshared("There is no entropy bonus here; set it to false.", paths=_at("use_entropy_loss")),
    "advantage_batch_normalize": Unshared(
        "Advantages are normalised by group here; set it to false.", paths=_at("advantage_batch_normalize")
    ),
    "zero_variance_filter": Unshared(
        "Groups without variance stay in the divisors here; set it to false.", paths=_at("zero_variance_filter")
    ),
    "use_tis": Unshared("It is SkyRL's old name; use off_policy_correction.tis_ratio_type.", paths=_at("use_tis")),
}

QUIRKS = (
    "Where a batch comes without the engine's log-probs, SkyRL drops every correction without a word; here every batch "
    "has them.",
    "Ratios are formed in float32; here in the precision of the log-probs.",
    "A token mask with one bound does nothing in SkyRL; here it is refused.",
    "is_ratio_min counts masked tokens as 0; metrics here look at valid tokens alone.",
    "The KL term is averaged over tokens, then over sequences, whatever loss_reduction says; here it is reduced as the "
    "loss is.",
)


def compose(o: dict[str, Any]) -> Recipe:
    """The loss, then outlier mask, token mask, weight and sequence mask, each over what the masks before left."""
    notes = []
    if o["policy_loss_type"] == "dppo" and o["off_policy_correction.tis_ratio_type"]:
        notes.append("DPPO's ratio holds the mismatch, and the weight on old/mu counts it again, as in SkyRL.")
    # Tinker's plain importance sampling takes no correction.
    bare = o["policy_loss_type"] == "importance_sampling"
    length = {"fixed_length": o["max_seq_len"]} if o["loss_reduction"] == "seq_mean_token_sum_norm" else {}
    return recipe(
        _loss(o),
        correction=[] if bare else _corrections(o),
        reduction=entry("reduction", REDUCTIONS[o["loss_reduction"]], **length),
        notes=notes,
    )


def _loss(o: dict[str, Any]) -> Entry:
    kind = o["policy_loss_type"]
    low, high = o["eps_clip_low"], o["eps_clip_high"]
    shared = {"beta": o["kl_loss_coef"] if o["use_kl_loss"] else 0.0, "use_bias_correction_kl": False}
    shared |= {"scale_rewards": "group" if o["grpo_norm_by_std"] else "none"}
    if kind in ("regular", "dual_clip"):
        c = o["clip_ratio_c"] if kind == "dual_clip" else None
        return entry("loss", "grpo", epsilon=low, epsilon_high=high, dual_clip=c, clamp_nats=CLAMP, **shared)
    if kind == "gspo":
        own = {"gradient": "token", "sequence_clamp_nats": 10.0}
        return entry("loss", "gspo", epsilon=low, epsilon_high=high, **own, **shared)
    if kind == "sapo":
        return entry("loss", "sapo", tau_pos=o["sapo.tau_pos"], tau_neg=o["sapo.tau_neg"], clamp_nats=CLAMP, **shared)
    if kind == "cispo":
        return _cispo(o, shared)
    if kind == "rollout_is":
        return entry("loss", "rollout_is", epsilon_low=low, epsilon_high=high, clamp_nats=CLAMP, **shared)
    if kind == "dppo":
        own = {"divergence": o["dppo.dppo_type"].removeprefix("binary_"), "clamp_nats": CLAMP}
        deltas = {"delta_low": o["dppo.delta_low"], "delta_high": o["dppo.delta_high"]}
        return entry("loss", "dppo", **own, **deltas, **shared)
    return entry("loss", "importance", anchor="theta/old", **shared)


def _cispo(o: dict[str, Any], shared: dict[str, Any]) -> Entry:
    rollout = o["cispo.cispo_anchor"] == "rollout"
    if rollout and o["off_policy_correction.tis_ratio_type"]:
        way_out = "The anchor rollout holds the mismatch already."
        raise refuse("off_policy_correction.tis_ratio_type", o["off_policy_correction.tis_ratio_type"], "null", way_out)
    return entry(
        "loss",
        "cispo",
        anchor="theta/mu" if rollout else "theta/old",
        floor=max(0.0, 1 - o["cispo.cispo_eps_clip_low"]),
        epsilon_high=1 + o["cispo.cispo_eps_clip_high"],
        clamp_nats=CLAMP,
        **shared,
    )


def _corrections(o: dict[str, Any]) -> list[Entry]:
    p = {name.removeprefix("off_policy_correction."): value for name, value in o.items()}
    found: list[Entry] = []
    low, high = p["outlier_token_is_threshold_low"], p["outlier_token_is_threshold_high"]
    if low is not None or high is not None:
        found.append(_on_mismatch("outlier_veto", low=low, high=high, clamp_nats=CLAMP))
    low, high = p["token_mask_is_threshold_low"], p["token_mask_is_threshold_high"]
    if (low is None) != (high is None):
        one = "token_mask_is_threshold_" + ("low" if low is not None else "high")
        raise refuse(
            f"off_policy_correction.{one}", p[one], "both bounds, or neither", "With one of them SkyRL masks nothing."
        )
    if low is not None:
        found.append(_on_mismatch("token_mask", low=low, high=high, clamp_nats=CLAMP))
    if p["tis_ratio_type"] == "token":
        found.append(_on_mismatch("token_tis", cap=p["token_tis_ratio_clip_high"], clamp_nats=CLAMP))
    elif p["tis_ratio_type"] == "sequence":
        # The sum of log-ratios is what is held within ±20, not a token's.
        cap = p["sequence_tis_ratio_clip_high"]
        found.append(_on_mismatch("sequence_tis", cap=cap, floor=math.exp(-CLAMP), over="kept"))
    metric = p["sequence_mask_metric"]
    if metric is not None:
        short = "geo" if metric == "geometric" else "product"
        bounds = {"low": p[f"{short}_mask_low"], "high": p[f"{short}_mask_high"]}
        aggregate = "mean" if metric == "geometric" else "sum"
        found.append(_on_mismatch("sequence_mask", aggregate=aggregate, over="kept", **bounds))
    return found


def _on_mismatch(stem: str, **fields: Any) -> Entry:
    return entry("correction", stem, anchor="old/mu", **fields)


def case(file: GoldenFile) -> Case:
    """The functions know no KL term; groups are named by their first and last row."""
    import torch

    from stalefront.parity import Case

    s = dict(file.settings)
    attached = s.pop("rollout_logprobs_attached", True)
    boundaries, micro = s.pop("prompt_boundaries", None), s.pop("micro_batch_size", None)
    rows = len(file.inputs["mask"])
    if not attached:
        # A fact about the harness's batch: without the engine's log-probs no rule can look at them.
        s.pop("off_policy_correction", None)
    group_B = torch.zeros(rows, dtype=torch.int64)
    for number, (first, after) in enumerate(boundaries or ()):
        group_B[first:after] = number

    def inputs(batch: LossInputs) -> LossInputs:
        from dataclasses import replace

        return replace(batch, group_B=group_B) if boundaries else batch

    compare = {
        **({"loss_mask_after": lambda e: e.kept_BT} if "loss_mask_after" in file.outputs else {}),
        **(
            {"tis_ratio": lambda e: e.weights.weight_BT}
            if attached and file.outputs.get("tis_ratio") is not None
            else {}
        ),
    }
    return Case(
        {**s, "use_kl_loss": False},
        inputs=inputs,
        compare=compare,
        micro_batch_B=torch.arange(rows) // micro if micro else None,
        single=("unbounded", "ratios") if s["policy_loss_type"] in SINGLE else ("unbounded",),
    )


FRAMEWORK = Framework(
    "skyrl",
    "NovaSky-AI/SkyRL a9564572eb8e",
    OPTIONS,
    compose,
    case,
    tolerance=5e-8,
    sections=tuple(f"trainer.algorithm.{name}" for name in ("off_policy_correction", "cispo", "dppo", "sapo")),
    not_shared=NOT_SHARED,
    quirks=QUIRKS,
)
