"""The applied update: clip, set the rate, step, and measure what truly changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stalefront.batch import Update
from stalefront.controller import AS_IT_IS, Decision

if TYPE_CHECKING:
    from stalefront.optimizer import Optimizer


# Entries summed at once; a bound on the memory of the float64 copies.
CHUNK = 1 << 20


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """One float32 vector of all entries."""
    return torch.cat([t.detach().reshape(-1).float() for t in tensors])


def dot(a: Tensor, b: Tensor) -> float:
    """⟨a, b⟩ in float64, a piece at a time: a float32 sum over 10⁸ entries is off by a percent on a CPU (measured)."""
    pieces = zip(torch.split(a, CHUNK), torch.split(b, CHUNK), strict=True)
    return sum(float(x.double() @ y.double()) for x, y in pieces)


def norm(a: Tensor) -> float:
    """‖a‖."""
    return math.sqrt(dot(a, a))


def cosine(a: Tensor, b: Tensor) -> float:
    """⟨a, b⟩ / (‖a‖ ‖b‖); NaN where one of them is zero or not finite, since no angle exists then."""
    norms = norm(a) * norm(b)
    return dot(a, b) / norms if norms > 0 else math.nan


def _spread(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` with the entries of `vector`: the reverse of `flat`."""
    for tensor, piece in zip(tensors, torch.split(vector, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


def clip_factor(norm: float, limit: float | None) -> float:
    """Factor that `clip_grad_norm_` multiplies a gradient of this norm by; its 1e-6 guards a zero norm."""
    if limit is None:
        return 1.0
    return min(1.0, limit / (norm + 1e-6)) if math.isfinite(norm) else limit / norm


class Updater:
    """Applies gradients and remembers the previous ones."""

    def __init__(self, model: torch.nn.Module, options: Optimizer) -> None:
        """`model` is at π₀: distances are measured from here."""
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.options = options
        self.torch = options.build(self.params)
        self.start = flat(self.params)
        self.previous_grad: Tensor | None = None
        self.previous_delta: Tensor | None = None

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        self.torch.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """Accumulated gradient of every parameter; zero where nothing has reached it."""
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return [p.grad for p in self.params if p.grad is not None]

    def apply(self, step: int, lr_scale: float = 1.0, decision: Decision = AS_IT_IS) -> Update:
        """Clip the accumulated gradient, step at the scheduled rate times `lr_scale`, and measure.

        The applied gradient is what the optimizer sees: after clipping, and for `nsgd` after division by its norm.
        A non-finite gradient is applied like any other: what it does to the weights is an observation. What
        controllers decided comes in this order: forget the optimizer's state, skip, take another gradient, clip, scale
        the rate, step, shorten the update.
        """
        if decision.reset_optimizer:
            self.torch.state.clear()
        lr = self.options.lr_at(step)
        if decision.skip:
            return self._skipped(lr)
        grads = self.gradients()
        if decision.gradient is not None:
            _spread(decision.gradient, grads)
        raw, factor = self._clip(grads)
        gradient, before = flat(grads), flat(self.params)
        lr_scale = lr_scale * decision.scale
        for group in self.torch.param_groups:
            group["lr"] = lr * lr_scale
        self.torch.step()
        short = self._shorten(before, decision.cap)
        update = self.measure(before, gradient, raw=raw, factor=factor, lr=lr, lr_scale=lr_scale * short)
        return replace(update, cap_factor=short)

    def _skipped(self, lr: float) -> Update:
        """The record of a step at which nothing was applied; what the next one is compared with stays."""
        now = flat(self.params)
        return Update(
            lr_asked=lr,
            lr_scale=0.0,
            lr_applied=0.0,
            stepped=False,
            finite=bool(torch.isfinite(now).all()),
            grad_norm_raw=float(torch.nn.utils.get_total_norm(self.gradients())),
            grad_norm_applied=0.0,
            clip_factor=1.0,
            update_norm=0.0,
            dist_from_start=norm(now - self.start),
            param_norm=norm(now),
            cos_grad=None,
            cos_update=None,
        )

    def _shorten(self, before: Tensor, cap: float | None) -> float:
        """Bring the weights back towards `before` until ‖Δθ‖ ≤ `cap`; returns the factor on Δθ.

        Every rule's Δθ is its rate times something that the rate does not enter, so that this is the step of a rate
        that is smaller by the factor. A length that is not finite has no such factor.
        """
        if cap is None:
            return 1.0
        delta = flat(self.params) - before
        length = norm(delta)
        if not cap < length < math.inf:
            return 1.0
        _spread(before.add(delta, alpha=cap / length), [p.data for p in self.params])
        return cap / length

    def measure(
        self, before: Tensor, gradient: Tensor, *, raw: float, factor: float, lr: float, lr_scale: float
    ) -> Update:
        """What the step did that began at the weights `before` with the applied gradient `gradient` (both flat)."""
        after = flat(self.params)
        delta = after - before
        update = Update(
            lr_asked=lr,
            lr_scale=lr_scale,
            lr_applied=lr * lr_scale,
            stepped=True,
            finite=bool(torch.isfinite(after).all()),
            grad_norm_raw=raw,
            grad_norm_applied=norm(gradient),
            clip_factor=factor,
            update_norm=norm(delta),
            dist_from_start=norm(after - self.start),
            param_norm=norm(after),
            cos_grad=None if self.previous_grad is None else cosine(gradient, self.previous_grad),
            cos_update=None if self.previous_delta is None else cosine(delta, self.previous_delta),
        )
        self.previous_grad, self.previous_delta = gradient, delta
        return update

    def _clip(self, grads: list[Tensor]) -> tuple[float, float]:
        """Norm before clipping, and the factor the gradient was multiplied by."""
        if self.options.kind == "nsgd":
            norm = float(torch.nn.utils.get_total_norm(grads))
            factor = 1.0 / norm if norm > 0 else 1.0
            torch._foreach_mul_(grads, factor)
            return norm, factor
        limit = self.options.max_grad_norm
        if limit is None:
            return float(torch.nn.utils.get_total_norm(grads)), 1.0
        norm = float(torch.nn.utils.clip_grad_norm_(self.params, limit))
        return norm, clip_factor(norm, limit)

    def state_dict(self) -> dict[str, Any]:
        """Everything a restart needs to go on bit for bit."""
        return {
            "torch": self.torch.state_dict(),
            "start": self.start,
            "previous_grad": self.previous_grad,
            "previous_delta": self.previous_delta,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.torch.load_state_dict(state["torch"])
        self.start = state["start"]
        self.previous_grad = state["previous_grad"]
        self.previous_delta = state["previous_delta"]
