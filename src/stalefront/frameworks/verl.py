"""verl: actor losses, `rollout_correction` (decoupled and bypass mode), aggregation modes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared, refuse
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.parity import Case, GoldenFile, Number

# Log-ratios are bounded to ±20 nats before exp, and so is a sequence's sum: its weight is then at least e^−20.
CLAMP_NATS = 20.0
FLOOR = math.exp(-CLAMP_NATS)

RULES = {
    **{f"token_{kind}": ("token_mask", None) for kind in ("k1", "k2", "k3")},
    **{f"seq_{how}_{kind}": ("sequence_mask", how) for how in ("sum", "mean") for kind in ("k1", "k2", "k3")},
    **{f"seq_max_{kind}": ("sequence_mask", "max") for kind in ("k2", "k3")},
}
STATISTIC = {"k1": "inverse_ratio", "k2": "k2", "k3": "k3"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"

OPTIONS = {
    "loss_mode": Option(
        Literal["vanilla", "gspo", "sapo", "cispo", "geo_mean", "gpg", "dro", "dppo_tv", "dppo_kl"],
        (f"{ACTOR}.policy_loss.loss_mode",),
    ),
    "clip_ratio": Option(float, (f"{ACTOR}.clip_ratio",)),
    "clip_ratio_low": Option(float | None, (f"{ACTOR}.clip_ratio_low",)),
    "clip_ratio_high": Option(float | None, (f"{ACTOR}.clip_ratio_high",)),
    "clip_ratio_c": Option(float, (f"{ACTOR}.clip_ratio_c",)),
    "loss_agg_mode": Option(
        Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
        (f"{ACTOR}.loss_agg_mode",),
    ),
    "loss_scale_factor": Option(int | None, (f"{ACTOR}.loss_scale_factor",)),
    "tau_pos": Option(float, (f"{ACTOR}.tau_pos",)),
    "tau_neg": Option(float, (f"{ACTOR}.tau_neg",)),
    "dro_beta": Option(float, (f"{ACTOR}.policy_loss.dro_beta",)),
    "use_kl_loss": Option(bool, (f"{ACTOR}.use_kl_loss",)),
    "kl_loss_coef": Option(float, (f"{ACTOR}.kl_loss_coef",)),
    "kl_loss_type": Option(Literal["low_var_kl", "k3"], (f"{ACTOR}.kl_loss_type",)),
    "norm_adv_by_std_in_grpo": Option(bool, ("algorithm.norm_adv_by_std_in_grpo",)),
    "rollout_is": Option(Literal["token", "sequence"] | None, (f"{CORRECTION}.rollout_is",)),
    "rollout_is_threshold": Option(float | str, (f"{CORRECTION}.rollout_is_threshold",)),
    "rollout_is_batch_normalize": Option(bool, (f"{CORRECTION}.rollout_is_batch_normalize",)),
    "rollout_rs": Option(str | None, (f"{CORRECTION}.rollout_rs",)),
    "rollout_rs_threshold": Option(float | str | None, (f"{CORRECTION}.rollout_rs_threshold",)),
    "bypass_mode": Option(bool, (f"{CORRECTION}.bypass_mode",)),
    "loss_type": Option(Literal["ppo_clip", "reinforce"], (f"{CORRECTION}.loss_type",)),
    "trainer_version": Option(Literal["legacy", "v1"], ()),
    "global_batch_info": Option(Literal["supplied", "absent"], ()),
}
NOT_SHARED = {
    "adv_estimator": Unshared(
        "Advantages here are relative to the group: adv_estimator=grpo.", ("grpo",), ("algorithm.adv_estimator",)
    ),
    "use_kl_in_reward": Unshared(
        "A KL penalty inside the reward is not offered: use use_kl_loss.", (False,), ("algorithm.use_kl_in_reward",)
    ),
    "entropy_coeff": Unshared("There is no entropy bonus.", (0, 0.0), (f"{ACTOR}.entropy_coeff",)),
    "debug_rollout_actor_probs": Unshared("It only logs.", (False, True), (f"{CORRECTION}.debug_rollout_actor_probs",)),
    "rollout_token_veto_threshold": Unshared(
        "verl removed the veto; framework=verl_fork_vcpo has it.",
        (None,),
        (f"{CORRECTION}.rollout_token_veto_threshold",),
    ),
    **{
        name: Unshared("clip-cov and kl-cov losses are not offered.", (off,), (f"{ACTOR}.policy_loss.{name}",))
        for name, off in {
            **{"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
            **{"kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1},
        }.items()
    },
}


def compose(o: dict[str, Any]) -> Recipe:
    """Decoupled mode: corrections on old/μ beside the loss on θ/old; bypass mode: old is μ."""
    bypass_loss = o["bypass_mode"] and o["trainer_version"] == "legacy"
    if bypass_loss and o["loss_mode"] != "vanilla":
        way_out = "Set loss_type, or trainer_version=v1, which keeps loss_mode."
        raise refuse("loss_mode", o["loss_mode"], "vanilla: bypass_mode replaces it in the legacy trainer", way_out)
    if o["bypass_mode"] and not bypass_loss and (o["rollout_is"] or o["rollout_rs"]):
        field = "rollout_is" if o["rollout_is"] else "rollout_rs"
        legal = "null: with bypass_mode old is mu, so old/mu is 1 and it never acts"
        raise refuse(field, o[field], legal, "trainer_version=legacy computes it from theta/mu.")
    anchor = "theta/mu" if o["bypass_mode"] else "old/mu"
    uses_is = not bypass_loss or o["loss_type"] == "reinforce"
    correction = [*(is_weights(o, anchor) if uses_is else []), *rejection(o, anchor)]
    loss, mode = bypass(o) if bypass_loss else LOSSES[o["loss_mode"]](o)
    notes = [f"bypass_mode in the legacy trainer takes the loss {o['loss_type']}; trainer_version=v1 keeps loss_mode"]
    return recipe(loss, correction=correction, reduction=aggregation(o, mode), notes=notes if bypass_loss else ())


def common(o: dict[str, Any]) -> dict[str, Any]:
    """Fields that every loss takes."""
    return {
        "beta": o["kl_loss_coef"] if o["use_kl_loss"] else 0.0,
        "use_bias_correction_kl": False,
        "scale_rewards": "group" if o["norm_adv_by_std_in_grpo"] else "none",
    }


def on_ratio(o: dict[str, Any]) -> dict[str, Any]:
    """The same, for a loss that holds a ratio."""
    anchor = "theta/mu" if o["bypass_mode"] else "theta/old"
    return {"anchor": anchor, "clamp_nats": CLAMP_NATS, **common(o)}


def clip(o: dict[str, Any]) -> tuple[float, float]:
    """Lower and upper clip width."""
    low, high = o["clip_ratio_low"], o["clip_ratio_high"]
    return (o["clip_ratio"] if low is None else low), (o["clip_ratio"] if high is None else high)


Composed = tuple[Entry, str]


def _vanilla(o: dict[str, Any]) -> Composed:
    low, high = clip(o)
    loss = entry("loss", "dapo", epsilon=low, epsilon_high=high, dual_clip=o["clip_ratio_c"], **on_ratio(o))
    return loss, o["loss_agg_mode"]


def _gspo(o: dict[str, Any]) -> Composed:
    low, high = clip(o)
    form = {"gradient": "token", "sequence_clamp_nats": 10.0}
    fields = {**on_ratio(o), "clamp_nats": None, **form}
    return entry("loss", "gspo", epsilon=low, epsilon_high=high, **fields), "seq-mean-token-mean"


def _sapo(o: dict[str, Any]) -> Composed:
    return entry("loss", "sapo", tau_pos=o["tau_pos"], tau_neg=o["tau_neg"], **on_ratio(o)), "seq-mean-token-mean"


def _cispo(o: dict[str, Any]) -> Composed:
    low, high = clip(o)
    return entry("loss", "cispo", floor=1 - low, epsilon_high=1 + high, **on_ratio(o)), o["loss_agg_mode"]


def _geo_mean(o: dict[str, Any]) -> Composed:
    if o["rollout_is"]:
        raise refuse("rollout_is", o["rollout_is"], "null with loss_mode=geo_mean", "Weights of GMPO are not shared.")
    low, high = clip(o)
    fields = {**on_ratio(o), "epsilon": low, "epsilon_high": high, "length_epsilon": 1e-8}
    return entry("loss", "gmpo", **fields), "seq-mean-token-mean"


def _gpg(o: dict[str, Any]) -> Composed:
    return entry("loss", "gpg", **common(o)), o["loss_agg_mode"]


def _dro(o: dict[str, Any]) -> Composed:
    return entry("loss", "dro", dro_beta=o["dro_beta"], **on_ratio(o)), o["loss_agg_mode"]


def _dppo(o: dict[str, Any]) -> Composed:
    low, high = clip(o)
    fields = {"delta_low": low, "delta_high": high, "objective": "logp", "cap": o["clip_ratio_c"]}
    divergence = o["loss_mode"].removeprefix("dppo_")
    base = "mu" if o["bypass_mode"] else "old"
    return entry("loss", "dppo", divergence=divergence, mask_base=base, **fields, **on_ratio(o)), o["loss_agg_mode"]


LOSSES: dict[str, Callable[[dict[str, Any]], Composed]] = {
    "vanilla": _vanilla,
    "gspo": _gspo,
    "sapo": _sapo,
    "cispo": _cispo,
    "geo_mean": _geo_mean,
    "gpg": _gpg,
    "dro": _dro,
    "dppo_tv": _dppo,
    "dppo_kl": _dppo,
}


def bypass(o: dict[str, Any]) -> Composed:
    """The legacy trainer's loss of bypass mode."""
    if o["loss_type"] == "ppo_clip":
        return _vanilla(o)
    return entry("loss", "reinforce", **common(o)), o["loss_agg_mode"]


def is_weights(o: dict[str, Any], anchor: str) -> list[Entry]:
    """`rollout_is`: truncated weights, or with two bounds weights that are zeroed outside of them."""
    level = o["rollout_is"]
    if level is None:
        return []
    low, high = bounds("rollout_is_threshold", o["rollout_is_threshold"])
    usual = {"anchor": anchor, "clamp_nats": CLAMP_NATS}
    if level == "token" and low is None:
        rule = entry("correction", "token_tis", cap=high, **usual)
    elif level == "token":
        rule = entry("correction", "icepop", low=low, high=high, outside="zero", **usual)
    elif low is None:
        rule = entry("correction", "sequence_tis", cap=high, floor=FLOOR, **{**usual, "clamp_nats": None})
    else:
        band = {"low": low, "high": high, "aggregate": "sum", "weight": "product", "outside": "zero"}
        rule = entry("correction", "sequence_mask", **band, **{**usual, "clamp_nats": None})
    if not o["rollout_is_batch_normalize"]:
        return [rule]
    return [rule, entry("correction", "normalize", over="tokens" if level == "token" else "sequences")]


def rejection(o: dict[str, Any], anchor: str) -> list[Entry]:
    """`rollout_rs`: rules that reject tokens or sequences, all on the original mask."""
    if o["rollout_rs"] is None:
        return []
    rules = list(dict.fromkeys(name.strip() for name in o["rollout_rs"].split(",") if name.strip()))
    for name in rules:
        if name not in RULES:
            raise refuse("rollout_rs", o["rollout_rs"], f"one or more of {', '.join(RULES)}, comma-separated")
    texts = str(o["rollout_rs_threshold"]).split(",") if o["rollout_rs_threshold"] is not None else []
    if len(texts) not in (1, len(rules)):
        legal = f"one threshold, or {len(rules)} comma-separated ones for rollout_rs={o['rollout_rs']}"
        raise refuse("rollout_rs_threshold", o["rollout_rs_threshold"], legal)
    texts = texts * len(rules) if len(texts) == 1 else texts
    found = [_rule(name, text, anchor) for name, text in zip(rules, texts, strict=True)]
    stems = [one["choice"] for one in found]
    if len(set(stems)) < len(stems):
        legal = "at most one token_* and one seq_* rule"
        raise refuse("rollout_rs", o["rollout_rs"], legal, "Two of a kind cannot be told apart here.")
    if "sequence_mask" in stems and o["rollout_is"] == "sequence" and "_" in str(o["rollout_is_threshold"]):
        legal = "a single upper bound beside a seq_* rule of rollout_rs"
        raise refuse("rollout_is_threshold", o["rollout_is_threshold"], legal)
    return found


def _rule(name: str, text: str, anchor: str) -> Entry:
    stem, aggregate = RULES[name]
    kind = name.rsplit("_", 1)[-1]
    low, high = bounds("rollout_rs_threshold", text)
    if kind == "k1":
        low = 1 / high if low is None else low
    elif low is not None:
        raise refuse("rollout_rs_threshold", text, f"a single upper bound for {name}")
    shape = {} if aggregate is None else {"aggregate": aggregate}
    band = {"statistic": STATISTIC[kind], "low": low, "high": high}
    return entry("correction", stem, anchor=anchor, clamp_nats=CLAMP_NATS, **band, **shape)


def bounds(name: str, value: float | str) -> tuple[float | None, float]:
    """`2.0` is an upper bound, `0.5_5.0` a lower and an upper one."""
    low, _, high = str(value).strip().rpartition("_")
    legal = "a number above 0, or two as in 0.5_5.0"
    try:
        found = (float(low) if low else None), float(high)
    except ValueError as error:
        raise refuse(name, value, legal) from error
    if found[1] <= 0 or (found[0] is not None and not 0 < found[0] <= found[1]):
        raise refuse(name, value, legal)
    return found


def aggregation(o: dict[str, Any], mode: str) -> Entry:
    """`loss_agg_mode`; rejected tokens leave the denominators in the legacy trainer, and in bypass mode."""
    fields: dict[str, Any] = {
        "denominator": "kept" if o["rollout_rs"] and o["trainer_version"] == "legacy" else "valid",
        "skip_empty": o["global_batch_info"] == "absent",
    }
    if mode == "seq-mean-token-mean" and o["loss_mode"] != "geo_mean":
        fields |= {"epsilon": 1e-8, "epsilon_on": "tokens"}
    if mode == "seq-mean-token-sum-norm":
        fields["fixed_length"] = o["loss_scale_factor"]
    return entry("reduction", AGGREGATIONS[mode], **fields)


def case(file: GoldenFile) -> Case:
    """Golden files: a registered loss (`behaviour` says what its harness passed as old), or the correction alone."""
    from stalefront.parity import Case, old_is_mu

    settings = dict(file.settings)
    is_mu = settings.pop("behaviour", "old") == "mu"
    weights = settings.pop("rollout_is", None)
    settings |= weights if isinstance(weights, dict) else {"rollout_is": weights}
    policy = dict(settings.pop("policy_loss", {}))
    settings |= policy.pop("rollout_correction", {}) | policy
    if file.function not in ("rollout_correction", "bypass_mode"):
        settings |= {"loss_mode": file.function, "trainer_version": "v1"}
    settings |= {"bypass_mode": is_mu, "global_batch_info": "absent"}
    compare: dict[str, Number] = {
        "rollout_is_weights": lambda e: e.weight_BT,
        "modified_response_mask": lambda e: e.kept_BT,
    }
    compare = {key: ours for key, ours in compare.items() if file.outputs.get(key) is not None}
    return Case(options=settings, inputs=old_is_mu if is_mu else None, compare=compare)


FRAMEWORK = Framework(
    name="verl",
    source="verl-project/verl 1dda039b9c63",
    options=OPTIONS,
    compose=compose,
    case=case,
    sections=(CORRECTION, f"{ACTOR}.policy_loss"),
    not_shared=NOT_SHARED,
    quirks=(
        "low_var_kl bounds the log-ratio to ±20 and the estimate to ±10; ours bounds neither.",
        "Advantages are divided by σ + 1e-6; ours by σ + 1e-4.",
        "Rejected tokens leave the KL term too; ours keeps it on every token.",
        "sequence weights bound each token's log-ratio nowhere but the sum; so do ours, by floor.",
    ),
)
