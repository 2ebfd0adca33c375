"""Float32 inside of float64: what a framework gives that takes float64 log-probs and forms its ratios in float32.

Training runs in float32 anyway. Golden files are in float64, so that everything else is exact; a ratio that was rounded
to float32 on its way is then off by 6e-8, its gradient by twice as much, and neither is an error of ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stalefront.batch import LossInputs, Weights
from stalefront.correction import TruncatedRatio

if TYPE_CHECKING:
    from stalefront.correction import Correction


class _Rounded(torch.autograd.Function):
    """l → log(float32(e^l)), so that e^ of it is the rounded ratio; the gradient is rounded as it would be there."""

    @staticmethod
    def forward(ctx: Any, log_ratio: Tensor) -> Tensor:
        ratio = log_ratio.float().exp()
        ctx.save_for_backward(ratio)
        return ratio.to(log_ratio.dtype).log()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (ratio,), (grad,) = ctx.saved_tensors, grads
        wide = ratio.to(grad.dtype)
        # The gradient of the ratio itself is what is cast; a ratio of 0 or infinity is one that a clamp has held back.
        usable = (wide > 0) & wide.isfinite()
        above = torch.where(usable, grad / wide.where(usable, 1.0), torch.zeros_like(grad))
        return torch.where(usable, (above.float() * ratio).to(grad.dtype), torch.zeros_like(grad))


class SingleRatios(LossInputs):
    """A batch whose token ratios with θ on top are formed in float32."""

    def log_ratio_of_BT(self, anchor: str) -> Tensor:
        """See `LossInputs`."""
        value = super().log_ratio_of_BT(anchor)
        rounded: Tensor = _Rounded.apply(value) if anchor.startswith("theta") else value  # type: ignore[no-untyped-call]
        return rounded


def with_single_ratios(inputs: LossInputs) -> SingleRatios:
    """The same batch."""
    return SingleRatios(**{field.name: getattr(inputs, field.name) for field in fields(inputs)})


class SingleWeights:
    """A correction that looks at log-probs, and forms its weights, in float32.

    Bounds of a weight are float32 as well, unless `wide_bounds`: then a weight is float64 again before it is cut off.
    """

    def __init__(self, correction: Correction, *, wide_bounds: bool) -> None:
        self.correction, self.wide_bounds = correction, wide_bounds

    def choice(self) -> str:
        """See `stalefront.choice.Choice`."""
        return self.correction.choice()

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """See `stalefront.correction.Correction`."""
        values: dict[str, Any] = {f.name: _single(f.name, getattr(inputs, f.name)) for f in fields(inputs)}
        single = LossInputs(**values)
        rule, bounds = self.correction, (0.0, math.inf)
        if self.wide_bounds and isinstance(rule, TruncatedRatio):
            rule, bounds = replace(rule, floor=0.0, cap=math.inf), (rule.floor, rule.cap)
        found = rule(single, replace(Weights.ones(single), keep_BT=so_far.keep_BT))
        return so_far.times(found.weight_BT.to(so_far.weight_BT.dtype).clamp(*bounds)).keeping(found.keep_BT)


def with_single_weights(corrections: Sequence[Correction], *, wide_bounds: bool) -> tuple[Any, ...]:
    """The same rules, in order."""
    return tuple(SingleWeights(correction, wide_bounds=wide_bounds) for correction in corrections)


def _single(name: str, value: Tensor | None) -> Tensor | None:
    return value.detach().float() if value is not None and name.startswith("logp") else value
