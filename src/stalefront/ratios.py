"""Statistics of log-ratios that corrections threshold or weight by: pure functions, shared by several rules.

Notation: l = log-ratio of two policies on a token (0 off the mask), m = mask, B sequences, T tokens. Sequence
statistics have shape (B, 1). Nothing here replaces a non-finite value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stalefront.correction import Aggregate, Statistic


def token_statistic(log_ratio_BT: Tensor, kind: Statistic) -> Tensor:
    """What is averaged or summed: l for `ratio`, −l for `inverse_ratio`, `k2` l²/2, `k3` e^l − 1 − l and `inverse_k3`
    e^−l − 1 + l.

    On samples of the lower policy `k2` and `k3` estimate KL(lower ‖ upper) (Schulman 2020); `inverse_k3` would on
    samples of the upper one, and AReaL takes it on those of the lower.

    `difference` is no function of the ratio: see `probability_difference`.
    """
    if kind == "ratio":
        return log_ratio_BT
    if kind == "inverse_ratio":
        return -log_ratio_BT
    if kind == "k2":
        return log_ratio_BT.square() / 2
    assert kind in ("k3", "inverse_k3"), "a difference of probabilities is no function of the ratio"
    exponent = log_ratio_BT if kind == "k3" else -log_ratio_BT
    return torch.expm1(exponent) - exponent


def probability_difference(logp_BT: Tensor, other_BT: Tensor) -> Tensor:
    """p − q of the sampled tokens; 0 off the mask. Its size is the total variation of {token, all others}."""
    return logp_BT.exp() - other_BT.exp()


def bernoulli_kl(logp_BT: Tensor, other_BT: Tensor) -> Tensor:
    """KL(p ‖ q) of {sampled token, all others}: p log(p/q) + (1 − p) log((1 − p)/(1 − q)), in nats.

    Exactly 0 where p = q, and +inf where q is 0 or 1 and p is not.
    """
    p, q = logp_BT.exp(), other_BT.exp()
    token = torch.where(p == 0, torch.zeros_like(p), p * (logp_BT - other_BT))
    others: Tensor = torch.special.xlog1py(1 - p, -p) - torch.special.xlog1py(1 - p, -q)
    return token + others


def in_units_of_bounds(value: Tensor, kind: Statistic) -> Tensor:
    """Ratios are bounded as ratios: e^value for them (a mean is then the geometric one, a sum the product)."""
    return value.exp() if kind in ("ratio", "inverse_ratio") else value


def over_sequence(value_BT: Tensor, mask_BT: Tensor, how: Aggregate) -> Tensor:
    """Mean, sum or maximum over the tokens of a sequence that `mask_BT` holds: (B, 1); 0 for a sequence without any."""
    masked = torch.where(mask_BT, value_BT, torch.zeros_like(value_BT))
    if how == "sum":
        return masked.sum(-1, keepdim=True)
    if how == "mean":
        return masked.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    highest = value_BT.masked_fill(~mask_BT, -torch.inf).amax(-1, keepdim=True)
    return torch.where(mask_BT.any(-1, keepdim=True), highest, torch.zeros_like(highest))


def over_segments(value_BT: Tensor, mask_BT: Tensor, counted_BT: Tensor) -> Tensor:
    """Mean over each contiguous run of `mask_BT` in a row, on each of its tokens: (B, T); 0 off the mask.

    Only tokens that `counted_BT` holds enter a mean; a run without any has 0.
    """
    before = torch.nn.functional.pad(mask_BT, (1, 0))[:, :-1]
    # Runs are numbered through the whole batch, from 1; a row starts a new one. 0 collects what is off the mask.
    starts = (mask_BT & ~before).reshape(-1)
    run = (torch.cumsum(starts, 0) * mask_BT.reshape(-1)).long()
    counted = (counted_BT & mask_BT).reshape(-1)
    values = torch.where(counted, value_BT.reshape(-1), value_BT.new_zeros(()))
    runs = starts.numel() + 1
    total = values.new_zeros(runs).index_add(0, run, values)
    count = torch.zeros(runs, dtype=torch.int64, device=run.device).index_add(0, run, counted.long())
    return (total / count.clamp(min=1))[run].view_as(value_BT)


def smallest_with_mean_below(value_BT: Tensor, counted_BT: Tensor, budget: float) -> Tensor:
    """Where a value is among the smallest ones whose mean stays below `budget` (strictly); False where not counted.

    The largest are left out one after the other until the mean of the rest is below the budget. Values that equal the
    last one left out go with it, so that the order of rows decides nothing. If no rest satisfies the budget, the
    smallest value remains. NaN counts as larger than any number.
    """
    value = value_BT[counted_BT].double().sort().values
    if not value.numel():
        return torch.zeros_like(counted_BT)
    number = torch.arange(1, len(value) + 1, dtype=torch.float64, device=value.device)
    # Sums of k smallest do not decrease on average, so those below the budget are the first ones.
    most = int((value.cumsum(0) / number < budget).sum())
    limit = value[max(most, 1) - 1]
    tied = 0 < most < len(value) and bool(value[most] == limit)
    small = value_BT.double() < limit if tied else value_BT.double() <= limit
    return small & counted_BT


def last_with_mean_below(value_BT: Tensor, counted_BT: Tensor, budget: float) -> Tensor:
    """The same, but of equal values only as many are left out as must be, the first of the batch before the others."""
    value, order = value_BT[counted_BT].double().sort(descending=True, stable=True)
    keep = torch.zeros_like(value, dtype=torch.bool)
    if value.numel():
        mean = value.flip(0).cumsum(0) / torch.arange(1, len(value) + 1, dtype=torch.float64, device=value.device)
        below = mean.flip(0) < budget
        first = int(below.int().argmax()) if bool(below.any()) else len(value) - 1
        keep[order[first:]] = True
    found = torch.zeros_like(counted_BT)
    found[counted_BT] = keep
    return found & ~value_BT.isnan()


def inside(value: Tensor, low: float | None, high: float | None, *, inclusive: bool = True) -> Tensor:
    """Where low ≤ value ≤ high (or low < value < high); a bound of None is no bound, and NaN is outside of any."""
    keep = ~torch.isnan(value)
    if low is not None:
        keep = keep & ((value >= low) if inclusive else (value > low))
    if high is not None:
        keep = keep & ((value <= high) if inclusive else (value < high))
    return keep
