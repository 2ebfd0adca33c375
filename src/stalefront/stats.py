"""Statistics of a learner step: pure functions of the loss inputs, on valid tokens and before any mask or weight.

Notation: l = log-ratio of two policies on a valid token, r = e^l, n = number of valid tokens. Nothing here drops a
non-finite value: a NaN log-prob makes the statistics that contain it NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from stalefront.batch import LossInputs, RolloutBatch, Weights

if TYPE_CHECKING:
    from stalefront.loss import LossValue
    from stalefront.ranks import Ranks

QUANTILES = (0.05, 0.5, 0.95)
# Probability below which a token belongs to the tail. Assumed: what samplers cut lies mostly below it.
TAIL = 0.01
# Statistics of old/μ that are kept for the trainer's forward of the sampling weights, whatever stands as old.
MISMATCH = ("ratio_mean", "logratio_abs_mean", "logratio_sd_nats", "k1_nats", "k3_nats", "chi2")
DECOMPOSITION = ("logratio_var_nats2", "mismatch_var_share", "lag_var_share", "decomposition_error_nats")


class Seen(NamedTuple):
    """What one micro-batch of a learner step looked like; no graph."""

    inputs: LossInputs
    weights: Weights | None
    value: LossValue
    entropy_BT: Tensor

    def of_all_ranks(self, ranks: Ranks) -> Seen:
        """The whole micro-batch, from the rows that each rank saw."""
        inputs, weights, value = self.inputs, self.weights, self.value
        names = [f.name for f in fields(inputs) if getattr(inputs, f.name) is not None]
        tensors = [*(getattr(inputs, name) for name in names), *value._replace(loss=value.loss[None]), self.entropy_BT]
        if weights is not None:
            scale = torch.tensor([weights.step_scale], dtype=torch.float64, device=self.entropy_BT.device)
            tensors += [weights.weight_BT, weights.keep_BT, weights.removed_BT, scale]
        found = iter(ranks.gather(tensors))
        inputs = replace(inputs, **{name: next(found) for name in names})
        value = type(value)(next(found).sum(), next(found), next(found))
        entropy_BT = next(found)
        if weights is not None:
            weight_BT, keep_BT, removed_by_BT = (next(found) for _ in range(3))
            weights = replace(
                weights,
                weight_BT=weight_BT,
                keep_BT=keep_BT,
                removed_by_BT=removed_by_BT,
                step_scale=float(next(found).mean()),
            )
        return Seen(inputs, weights, value, entropy_BT)


def step_columns(seen: Sequence[Seen]) -> dict[str, Any]:
    """Columns of a learner step from its micro-batches, as if they had been one batch.

    `step_scale` comes along for the update; corrections that scale the step see one micro-batch each, so their
    scales are averaged.
    """
    inputs = joined([piece.inputs for piece in seen])
    weights = None
    if all(piece.weights is not None for piece in seen):
        weights = _joined_weights([piece.weights for piece in seen if piece.weights is not None])
    mask = inputs.mask_BT
    entropy = torch.cat([piece.entropy_BT for piece in seen])[mask].double()
    reference = inputs.logp_ref_BT
    return {
        "tokens": int(mask.sum()),
        "loss": float(sum(piece.value.loss for piece in seen)),
        "entropy_nats": float(entropy.mean()),
        **ratio_columns(inputs),
        **decomposition_columns(inputs),
        **({} if reference is None else kl_reference_columns(inputs.logp_theta_BT, reference, mask)),
        "clip_low_frac": share(torch.cat([piece.value.clip_low_BT for piece in seen]), mask),
        "clip_high_frac": share(torch.cat([piece.value.clip_high_BT for piece in seen]), mask),
        **weight_columns(weights, mask),
        **kept_columns(weights, mask),
        "step_scale": 1.0 if weights is None else weights.step_scale,
    }


def joined(parts: Sequence[LossInputs]) -> LossInputs:
    """One batch of several; a field that some part lacks is left out."""
    if len(parts) == 1:
        return parts[0]
    columns = [part.tensors() for part in parts]
    found = {name: [column[name] for column in columns if name in column] for name in columns[0]}
    whole: dict[str, Any] = dict.fromkeys(columns[0])
    whole |= {name: torch.cat(pieces) for name, pieces in found.items() if len(pieces) == len(parts)}
    return replace(parts[0], **whole)


def _joined_weights(parts: Sequence[Weights]) -> Weights:
    return Weights(
        torch.cat([p.weight_BT for p in parts]),
        torch.cat([p.keep_BT for p in parts]),
        sum(p.step_scale for p in parts) / len(parts),
        torch.cat([p.removed_BT for p in parts]),
        parts[0].rules,
    )


def ratio_columns(inputs: LossInputs) -> dict[str, Any]:
    """Statistics of θ/μ, θ/old and old/μ (see `log_ratio_stats`), and the ESS of θ/μ and of old/μ."""
    columns: dict[str, Any] = {}
    for anchor in ("theta/mu", "theta/old", "old/mu"):
        log_ratio = inputs.anchored_BT(anchor)[inputs.mask_BT].double()
        columns |= {f"{anchor.replace('/', '_')}_{k}": v for k, v in log_ratio_stats(log_ratio).items()}
    for anchor, prefix in (("theta/mu", ""), ("old/mu", "old_mu_")):
        log_ratio_BT = inputs.anchored_BT(anchor).double()
        columns[f"{prefix}ess_token_frac"] = ess_frac(log_ratio_BT[inputs.mask_BT])
        columns[f"{prefix}ess_seq_frac"] = ess_frac((log_ratio_BT * inputs.mask_BT).sum(-1))
    return columns


def decomposition_columns(inputs: LossInputs) -> dict[str, Any]:
    """What part of log θ/μ is mismatch of the sampler, and what part is lag.

    l = log θ/μ = a + b on a valid token, a = log recomputed/μ (two forwards of the same weights), b = log θ/recomputed
    (two versions). Then Var(l) = [Var(a) + Cov(a, b)] + [Var(b) + Cov(a, b)]; the two brackets over Var(l) are the
    shares, which sum to 1 and of which one may be negative; NaN where Var(l) is 0. Variances are divided by n.
    Recomputed is `old` where `logp_recomputed_BT` is None.
    """
    valid, recomputed_BT = inputs.mask_BT, inputs.logp_recomputed_BT
    recomputed_BT = inputs.logp_old_BT if recomputed_BT is None else recomputed_BT
    a = (recomputed_BT - inputs.logp_behav_BT)[valid].double()
    b = (inputs.logp_theta_BT.detach() - recomputed_BT)[valid].double()
    # As the loss takes it: the difference of two numbers in their own precision.
    log_ratio = inputs.anchored_BT("theta/mu")[valid].double()
    mismatch = log_ratio_stats(a)
    columns = {f"mismatch_{name}": mismatch[name] for name in MISMATCH}
    if not log_ratio.numel():
        return columns | dict.fromkeys(DECOMPOSITION, math.nan)
    variance = log_ratio.var(correction=0)
    covariance = ((a - a.mean()) * (b - b.mean())).mean()
    # 0/0 is NaN: where nothing varies nothing has a share.
    shares = [(part.var(correction=0) + covariance) / variance for part in (a, b)]
    error = (log_ratio - (a + b)).abs().max()
    return columns | dict(zip(DECOMPOSITION, map(float, (variance, *shares, error)), strict=True))


def log_ratio_stats(log_ratio_N: Tensor) -> dict[str, float]:
    """Statistics of n log-ratios l (nats) and of the ratios r = e^l.

    k1 = mean(−l), k2 = mean(l²)/2, k3 = mean(r − 1 − l) (Schulman, "Approximating KL divergence"),
    chi2 = mean((r − 1)²), sd = √(mean(l²) − mean(l)²). Over samples of μ with r = π/μ the first and the third are
    KL(μ‖π) in expectation, the second is to third order in l, and chi2 is χ²(π‖μ).
    """
    if log_ratio_N.numel() == 0:
        names = ("ratio_mean", "ratio_max", "logratio_mean", "logratio_abs_mean", "logratio_sd_nats")
        more = ("logratio_q05", "logratio_q50", "logratio_q95", "k1_nats", "k2_nats", "k3_nats", "chi2")
        return dict.fromkeys((*names, *more), math.nan)
    ratio = log_ratio_N.exp()
    # quantile() is not defined on NaN input for every back end; one NaN makes all of them NaN.
    low, mid, high = torch.quantile(log_ratio_N, torch.tensor(QUANTILES, dtype=torch.float64, device=ratio.device))
    return {
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "logratio_mean": float(log_ratio_N.mean()),
        "logratio_abs_mean": float(log_ratio_N.abs().mean()),
        "logratio_sd_nats": float(log_ratio_N.std(correction=0)),
        "logratio_q05": float(low),
        "logratio_q50": float(mid),
        "logratio_q95": float(high),
        "k1_nats": 0.0 - float(log_ratio_N.mean()),
        "k2_nats": float(log_ratio_N.square().mean() / 2),
        "k3_nats": float((ratio - 1 - log_ratio_N).mean()),
        "chi2": float((ratio - 1).square().mean()),
    }


def ess_frac(log_weight_N: Tensor) -> float:
    """Effective sample size as a share, (Σw)² / (n Σw²), from log-weights, so that no exponential overflows."""
    n = log_weight_N.numel()
    if n == 0:
        return math.nan
    log_ess = 2 * torch.logsumexp(log_weight_N, 0) - torch.logsumexp(2 * log_weight_N, 0)
    return float(log_ess.exp()) / n


def kl_reference_columns(logp_theta_BT: Tensor, logp_ref_BT: Tensor, mask_BT: Tensor) -> dict[str, Any]:
    """k1 = mean(log θ − log ref) and k3 = mean(e^d − d − 1), d = log ref − log θ, over valid tokens."""
    difference = (logp_ref_BT - logp_theta_BT)[mask_BT].double()
    return {
        "kl_ref_k1_nats": float(-difference.mean()),
        "kl_ref_k3_nats": float((difference.exp() - difference - 1).mean()),
    }


def lag_columns(batch: RolloutBatch, version_now: int) -> dict[str, Any]:
    """Realised lag of every trained token, and its split at the moment its sequence was finished."""
    version = batch.version_BT[batch.mask_BT].double()
    finished = batch.finished_version_B[:, None].expand_as(batch.mask_BT)[batch.mask_BT].double()
    lag = version_now - version
    return {
        "lag_mean_updates": float(lag.mean()),
        "lag_max_updates": float(lag.max()),
        "lag_wait_mean_updates": float((version_now - finished).mean()),
        "lag_gen_mean_updates": float((finished - version).mean()),
    }


def weight_columns(weights: Weights | None, mask_BT: Tensor) -> dict[str, Any]:
    """Correction weights on valid tokens and the share of tokens a correction rejected; absent without one.

    Where a weight is not a number, or all of them are 0, there is no effective sample size (NaN).
    """
    if weights is None:
        return dict.fromkeys(("weight_mean", "weight_min", "weight_ess_frac", "mask_frac"))
    weight = weights.weight_BT[mask_BT]
    kept = weights.keep_BT[mask_BT]
    return {
        "weight_mean": float(weight.mean()),
        "weight_min": float(weight.min()),
        "weight_ess_frac": ess_frac(weight.double().where(kept, 0.0).log()),
        "mask_frac": float((~kept).double().mean()),
    }


def kept_columns(weights: Weights | None, mask_BT: Tensor) -> dict[str, Any]:
    """Shares of tokens and sequences that still count, and of the tokens that each correction took away, by its name.

    The shares that are taken away and the one that is kept sum to 1.
    """
    if weights is None:
        return {"tokens_kept_frac": 1.0, "rows_kept_frac": float(mask_BT.any(-1).double().mean())}
    removed = weights.removed_BT[mask_BT]
    return {
        "tokens_kept_frac": float((removed == 0).double().mean()),
        "rows_kept_frac": float((mask_BT & (weights.removed_BT == 0)).any(-1).double().mean()),
        **{
            f"removed_{rule}_frac": float((removed == number).double().mean())
            for number, rule in enumerate(weights.rules, start=1)
        },
    }


def share(flag_BT: Tensor, mask_BT: Tensor) -> float:
    """Share of valid tokens where `flag_BT` holds."""
    return float(flag_BT[mask_BT].double().mean())
