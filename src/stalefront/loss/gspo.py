"""GSPO: the clip acts on the length-normalised ratio of whole sequences (arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.loss import ClippedLoss

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class GSPO(ClippedLoss):
    """(1/B) Σ_b −min(s A, clip(s) A), s = exp((1/|y|) Σ_t log r_t); TRL's grpo at sequence level.

    The paper's clip widths are 3e-4 and 4e-4; a token-level width of .2 hardly ever binds on s.
    """

    reduction = "sequence_mean"

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """Every token of a sequence carries the sequence's value."""
        from stalefront.surrogate import Surrogate, clipped, sequence_log_ratio_B1

        value = clipped(
            sequence_log_ratio_B1(inputs.log_ratio_BT, inputs.mask_BT),
            inputs.advantage_B[:, None],
            epsilon_low=self.epsilon,
            epsilon_high=self.clip_high,
            delta=self.delta,
        )
        shape = inputs.mask_BT.shape
        return Surrogate(*(part.expand(shape) for part in value))

    def ratio_BT(self, inputs: LossInputs) -> Tensor:
        """The sequence ratio s, on every token."""
        from stalefront.surrogate import sequence_log_ratio_B1

        return sequence_log_ratio_B1(inputs.log_ratio_BT, inputs.mask_BT).exp().expand(inputs.mask_BT.shape)
