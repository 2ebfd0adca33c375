"""Batch normalisation of the weights that the rules before made, to mean 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from stalefront.correction import Correction

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs, Weights


def batch_mean(
    weight_BT: Tensor, mask_BT: Tensor, over: Literal["tokens", "sequences"], empty: Literal["skip", "count"] = "skip"
) -> Tensor:
    """Mean weight over the tokens of a batch, or over its sequences, each of which has its mean over tokens: ()."""
    from stalefront.ratios import over_sequence

    if over == "tokens":
        return weight_BT.double()[mask_BT].mean()
    mean_B1 = over_sequence(weight_BT.double(), mask_BT, "mean")
    return mean_B1.mean() if empty == "count" else mean_B1[mask_BT.any(-1)].mean()


@dataclass(frozen=True)
class Normalize(Correction):
    """w ← w / mean(w): self-normalised importance sampling over a batch, as an option in verl and slime.

    The mean is over all completion tokens, those that a rule has rejected included, with the weights they still have.
    Where every weight is 0 they stay 0.

    Attributes
    ----------
    over
        `tokens`: each counts the same, as verl does for weights of tokens; `sequences`: each sequence counts the same,
        as verl does for weights of sequences.
    empty
        With `over=sequences`, one without a token: `skip` it, or `count` it with a mean of 0 (slime).
    """

    over: Literal["tokens", "sequences"]
    empty: Literal["skip", "count"]

    level = "batch"
    looks_at = "weight"
    kept_weight = "weight / mean"
    scope = "batch"

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """Every weight divided by the same number."""
        if not inputs.mask_BT.any():
            return so_far
        mean = batch_mean(so_far.weight_BT, inputs.mask_BT, self.over, self.empty)
        # Weights next to the smallest number have an inverse mean beyond the largest one: divide in float64.
        weight_BT = so_far.weight_BT.double() / mean.where(mean != 0, 1.0)
        return replace(so_far, weight_BT=weight_BT.to(so_far.weight_BT.dtype).where(inputs.mask_BT, so_far.weight_BT))
