"""One learner step's loss as a pure function: proximal policy → corrections in order → loss under its reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from stalefront.correction import chain

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs, Weights
    from stalefront.correction import Correction
    from stalefront.loss import Loss, LossValue
    from stalefront.proximal import Proximal
    from stalefront.reduction import Reduction


class Method(Protocol):
    """What decides a loss: a `Cell` is one, and so is what a `stalefront.recipe.Recipe` builds."""

    @property
    def loss(self) -> Loss: ...  # noqa: D102

    @property
    def correction(self) -> Sequence[Correction]: ...  # noqa: D102

    @property
    def reduction(self) -> Reduction: ...  # noqa: D102

    @property
    def proximal(self) -> Proximal: ...  # noqa: D102


class Objective(NamedTuple):
    """Loss of a whole batch, with everything on the way to it.

    Attributes
    ----------
    value
        Scalar with its graph, and where clips are active.
    weights
        What the corrections said; None without any.
    inputs
        Loss inputs after the proximal policy took its place.
    reduction_BT
        Weight of every token's loss.
    """

    value: LossValue
    weights: Weights | None
    inputs: LossInputs
    reduction_BT: Tensor


def objective(
    method: Method, inputs: LossInputs, *, max_completion_length: int, micro_batch_B: Tensor | None = None
) -> Objective:
    """Loss of a whole batch, in one piece.

    Parameters
    ----------
    inputs
        A whole learner step's; the reduction is made in the precision of its log-probs.
    max_completion_length : int
        L of the reduction `constant`.
    micro_batch_B : int64 (B,), or None
        Which micro-batch a sequence belongs to, for the reduction `micro_batch_mean`.
    """
    inputs = method.proximal(inputs)
    weights = chain(method.correction, inputs)
    reduction = method.reduction.weights_BT(
        counted_BT(method.reduction, inputs, weights),
        method.loss.reduction,
        max_completion_length=max_completion_length,
        group_B=inputs.group_B,
        micro_batch_B=micro_batch_B,
        dtype=inputs.logp_theta_BT.dtype,
    )
    return Objective(method.loss(inputs, weights, reduction), weights, inputs, reduction)


def counted_BT(reduction: Reduction, inputs: LossInputs, weights: Weights | None) -> Tensor:
    """Tokens that a reduction's divisors count: those of the batch, or those that corrections keep."""
    if weights is None or reduction.denominator == "valid":
        return inputs.mask_BT
    return inputs.mask_BT & weights.keep_BT
