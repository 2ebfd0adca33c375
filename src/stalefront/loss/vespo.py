"""VESPO: sequence weights through a Gamma-shaped kernel, soft on both sides of the on-policy product of ratios."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalefront.loss import RatioLoss

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class VESPO(RatioLoss):
    """(1/Σ|y|) Σ_bt −sg[φ] A log θ, φ = e^λ w^k e^(−λ w), w = Π_t r_t of the sequence.

    φ(1) = 1, and φ is largest at w = k/λ. k and λ are `k_pos`, `lambda_pos` where A ≥ 0, else `k_neg`, `lambda_neg`.
    Source: TRL's `loss_type="vespo"`, whose bounds on w are the defaults here; it turns a φ without a number into 0,
    and here it stays.

    Attributes
    ----------
    weight_floor, weight_cap_nats : float
        w is at least the first, log w at most the second.
    mismatch
        Whether the tokens' ratios old/μ enter w too, and how: each held within `mismatch_low` and `mismatch_high`
        (`truncate`), or put to the smallest w outside of them (`mask`). TRL's truncated importance sampling, which is a
        factor on the token's loss with its other losses.
    mismatch_low, mismatch_high : float or None
        None for no bound.
    """

    k_pos: float
    lambda_pos: float
    k_neg: float
    lambda_neg: float
    weight_floor: float
    weight_cap_nats: float
    mismatch: Literal["none", "truncate", "mask"]
    mismatch_low: float | None
    mismatch_high: float | None

    reduction = "token_mean"

    def check(self) -> None:
        """Shapes are positive, bounds in order."""
        super().check()
        for field in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"):
            self.require(getattr(self, field) > 0, field, "a number above 0")
        self.require(0 <= self.weight_floor <= 1, "weight_floor", "a number from 0 to 1")
        self.require(self.weight_cap_nats >= 0, "weight_cap_nats", "a number of at least 0")
        low, high = self.mismatch_low, self.mismatch_high
        self.require(low is None or 0 <= low <= 1, "mismatch_low", "a ratio from 0 to 1, or null")
        self.require(high is None or high >= 1, "mismatch_high", "a ratio of at least 1, or null")
        legal = "none with anchor=theta/mu, whose ratio holds it already"
        self.require(self.mismatch == "none" or self.anchor == "theta/old", "mismatch", legal)

    @property
    def unbounded(self) -> bool:
        """A floor on w leaves a weight on log θ = −∞."""
        return self.weight_floor > 0

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See `stalefront.surrogate.weighted_logp`."""
        from stalefront.surrogate import unclipped, weighted_logp

        kernel = self.kernel(inputs)
        return unclipped(weighted_logp(inputs.logp_theta_BT, kernel, inputs.advantage_B1))

    def kernel(self, inputs: LossInputs) -> Tensor:
        """φ of every sequence, without gradient: (B, 1), or (B, T) where a sequence has advantages of both signs."""
        import torch

        from stalefront.ratios import over_sequence

        floor = math.log(self.weight_floor) if self.weight_floor else -math.inf
        log_ratio = self.log_ratio_BT(inputs).detach()
        if self.mismatch != "none":
            log_ratio = log_ratio + self.mismatch_log_BT(inputs).clamp(floor, self.weight_cap_nats)
        log_w = over_sequence(log_ratio, inputs.mask_BT, "sum").clamp(floor, self.weight_cap_nats)
        good = inputs.advantage_B1 >= 0
        k, scale = (
            torch.where(good, log_w.new_tensor(pos), log_w.new_tensor(neg))
            for pos, neg in ((self.k_pos, self.k_neg), (self.lambda_pos, self.lambda_neg))
        )
        return torch.exp(scale + k * log_w - scale * torch.exp(log_w))

    def mismatch_log_BT(self, inputs: LossInputs) -> Tensor:
        """log old/μ of every token, truncated or masked."""
        import torch

        from stalefront.ratios import inside

        ratio = inputs.anchored_BT("old/mu").exp()
        low, high = self.mismatch_low, self.mismatch_high
        if self.mismatch == "mask":
            ratio = torch.where(inside(ratio, low, high), ratio, torch.zeros_like(ratio))
        elif low is not None or high is not None:
            ratio = ratio.clamp(min=low, max=high)
        return ratio.log()
