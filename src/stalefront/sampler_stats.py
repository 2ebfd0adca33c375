"""Statistics of a rollout batch that tell how its tokens were sampled: pure functions, on valid tokens.

Notation: old = the sampling weights by the trainer's forward, μ = what the sampler reported, H = entropy of old.
Nothing here drops a non-finite value; a mean over nothing is NaN, and a column whose input is not known is None.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stalefront.batch import RolloutBatch
from stalefront.stats import TAIL


def sampler_columns(batch: RolloutBatch) -> dict[str, Any]:
    """Columns of a rollout batch that every learner step on it repeats."""
    valid_BT = batch.mask_BT
    logp_old = batch.logp_old_BT[valid_BT].double()
    # A NaN is below nothing, so it would pass for a token of the bulk.
    in_tail = torch.where(logp_old.isnan(), logp_old, (logp_old.exp() < TAIL).double())
    tail = batch.tail_mass_BT
    return {
        "batch_tokens": logp_old.numel(),
        **surprisal_columns(batch),
        "tail_expected_frac": None if tail is None else float(tail[valid_BT].double().mean()),
        "tail_observed_frac": float(in_tail.mean()),
        "kv_stale_frac": float(batch.kv_stale_BT[valid_BT].double().mean()),
        "misaligned_frac": misaligned_frac(batch),
        **route_columns(batch),
    }


def surprisal_columns(batch: RolloutBatch) -> dict[str, Any]:
    """Mean of x = −log old(token) − H over n valid tokens, and its standard error sd(x)/√n.

    Drawn from old, x has mean 0 given all tokens before it, so that its values are uncorrelated and their mean is 0
    within its standard error. Below 0: likely tokens came too often, as under a lower temperature or a cut tail. This
    looks at the tokens alone, so it also sees a change of the sampler that was logged as if it were not there, which
    every statistic of old/μ is blind to.
    """
    if batch.entropy_behav_BT is None:
        return dict.fromkeys(("surprisal_gap_nats", "surprisal_gap_se_nats"))
    excess = (-batch.logp_old_BT - batch.entropy_behav_BT)[batch.mask_BT].double()
    n = excess.numel()
    error = float(excess.std(correction=0)) / math.sqrt(n) if n else math.nan
    return {"surprisal_gap_nats": float(excess.mean()), "surprisal_gap_se_nats": error}


def misaligned_frac(batch: RolloutBatch) -> float | None:
    """m / (n + m): m sampled tokens that lost their log-prob when the text was encoded again, n valid ones."""
    if batch.misaligned_B is None:
        return None
    lost = int(batch.misaligned_B.sum())
    every = int(batch.mask_BT.sum()) + lost
    return lost / every if every else math.nan


def route_columns(batch: RolloutBatch) -> dict[str, Any]:
    """Experts of sampler and trainer under the same weights: where the sets differ, and what was not handed over.

    Flips are counted on valid tokens whose route is known on both sides. The last token of a row is never fed to the
    sampler, so it has no route to hand over.
    """
    routes_LBTK, own_LBTK, valid_BT = batch.routes_LBTK, batch.own_routes_LBTK, batch.mask_BT
    if routes_LBTK is None:
        return dict.fromkeys(("expert_flip_frac", "expert_flip_token_frac", "route_fallback_frac"))
    known_LBT = (routes_LBTK >= 0).all(-1)
    columns = {"route_fallback_frac": _share(~known_LBT, fed_BT(batch).expand_as(known_LBT))}
    if own_LBTK is None:
        return columns | dict.fromkeys(("expert_flip_frac", "expert_flip_token_frac"))
    from stalefront.routing import flips_LBT

    flips = flips_LBT(routes_LBTK, own_LBTK) & valid_BT
    known = known_LBT & (own_LBTK >= 0).all(-1) & valid_BT
    return {
        **columns,
        "expert_flip_frac": _share(flips, known),
        "expert_flip_token_frac": _share(flips.any(0), known.any(0)),
        **{f"expert_flip_layer_{layer}_frac": _share(flips[layer], known[layer]) for layer in range(len(flips))},
    }


def fed_BT(batch: RolloutBatch) -> Tensor:
    """Tokens that the sampler was fed: those of the prompt and of the completion that a valid token comes after."""
    after_BT = batch.mask_BT.flip(-1).cumsum(-1).flip(-1) - batch.mask_BT.long()
    return (batch.position_BT >= 0) & (after_BT > 0)


def _share(flag: Tensor, among: Tensor) -> float:
    """Share of the entries of `among` where `flag` holds; NaN of none."""
    return float(flag[among].double().mean())
