"""The optimizer group: which rule turns an applied gradient into an update, and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalefront.choice import Choice, is_count

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Optimizer(Choice):
    """Options of the update.

    `kind` is `adamw` (decoupled weight decay), `sgd` (no momentum) or `nsgd` (the gradient divided by its norm, so
    that every step has length `lr`). `warmup_steps` is a linear ramp: the rate at learner step t (from 1) is
    `lr · min(1, t / warmup_steps)`; after it the rate is constant. `grad_accum` splits a batch into that many
    micro-batches whose gradients add up to the whole batch's before the one update is applied.
    """

    kind: Literal["adamw", "sgd", "nsgd"]
    lr: float
    warmup_steps: int
    betas: tuple[float, float] | None
    eps: float | None
    weight_decay: float
    max_grad_norm: float | None
    grad_accum: int

    @classmethod
    def key(cls, field: str) -> str:
        """Override key of `field`."""
        return f"optimizer.{field}"

    def check(self) -> None:
        """Ranges of every field."""
        self.require(math.isfinite(self.lr) and self.lr > 0, "lr", "a finite number above 0")
        self.require(self.warmup_steps >= 0, "warmup_steps", "a whole number of at least 0")
        self._check_adam()
        self.require(math.isfinite(self.weight_decay) and self.weight_decay >= 0, "weight_decay", "at least 0")
        limit = self.max_grad_norm
        self.require(limit is None or limit > 0, "max_grad_norm", "a number above 0, or null for no clipping")
        self.require(is_count(self.grad_accum), "grad_accum", "a whole number of at least 1")

    def _check_adam(self) -> None:
        """Options that a rule would ignore are refused, so that no axis runs the same thing under several names."""
        if self.kind == "adamw":
            betas, eps = self.betas, self.eps
            ok = betas is not None and all(0 <= b < 1 for b in betas)
            self.require(ok, "betas", "two numbers in [0, 1) for adamw")
            self.require(eps is not None and math.isfinite(eps) and eps >= 0, "eps", "at least 0 for adamw")
            return
        self.require(self.betas is None, "betas", f"null for {self.kind}", "It has no moments.")
        self.require(self.eps is None, "eps", f"null for {self.kind}", "It divides by nothing that needs one.")
        if self.kind == "nsgd":
            way_out = "Every step of nsgd has length lr already."
            self.require(self.weight_decay == 0, "weight_decay", "0 for nsgd", way_out)
            self.require(self.max_grad_norm is None, "max_grad_norm", "null for nsgd", way_out)

    def lr_at(self, step: int) -> float:
        """Learning rate asked for at learner step `step` (from 1)."""
        return self.lr * min(1.0, step / self.warmup_steps) if self.warmup_steps else self.lr

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Torch optimizer over `params`; the rate is set anew before every step."""
        from torch.optim import SGD, AdamW

        if self.betas is not None and self.eps is not None:
            # fused: one kernel a step instead of a dozen for every tensor, which a tiny model feels most.
            return AdamW(params, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=True)
        return SGD(params, lr=self.lr, weight_decay=self.weight_decay)
