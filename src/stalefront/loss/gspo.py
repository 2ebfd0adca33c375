"""GSPO: the clip acts on the length-normalised ratio of whole sequences (arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from stalefront.loss import ClippedLoss

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs
    from stalefront.reduction import Kind
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class GSPO(ClippedLoss):
    """(1/B) Σ_b −min(s A, clip(s) A), s = exp((1/|y|) Σ_t log r_t); TRL's grpo at sequence level.

    The paper's clip widths are 3e-4 and 4e-4; a token-level width of .2 hardly ever binds on s.

    Attributes
    ----------
    over
        Tokens of the mean: `valid`, or only those `kept` by the corrections.
    gradient
        `sequence`: every token's loss has the gradient of s. `token`: its own, sg[s] θ/sg[θ] (the paper's GSPO-token).
        The two agree while all tokens of a sequence have one advantage and one weight.
    sequence_clamp_nats : float or None
        Upper bound on log s, beyond which it has no gradient; None for none.
    advantage
        `token`: each token's own. `sequence`: the mean over the tokens that enter s (AReaL, PipelineRL). The two agree
        while a sequence has one advantage.
    length_epsilon : float
        Added to |y| in the mean (NeMo-RL 1e-8).
    """

    over: Literal["valid", "kept"]
    gradient: Literal["sequence", "token"]
    sequence_clamp_nats: float | None
    advantage: Literal["token", "sequence"]
    length_epsilon: float

    reduction: ClassVar[Kind] = "sequence_mean"

    def check(self) -> None:
        """The bound is positive."""
        super().check()
        clamp = self.sequence_clamp_nats
        self.require(clamp is None or clamp > 0, "sequence_clamp_nats", "a number above 0, or null")
        self.require(0 <= self.length_epsilon < 1, "length_epsilon", "a number of at least 0 and below 1")

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """Every token of a sequence carries the sequence's value."""
        from stalefront.surrogate import Surrogate

        value = self.clipped(self.sequence_log_ratio(inputs), self.advantage_of(inputs))
        shape = inputs.mask_BT.shape
        return Surrogate(*(part.expand(shape) for part in value))

    def sequence_log_ratio(self, inputs: LossInputs) -> Tensor:
        """log s: (B, 1), or (B, T) where each token has its own gradient."""
        from stalefront.surrogate import gradient_carrier, sequence_log_ratio_B1

        counted = self.counted_BT(inputs)
        value = sequence_log_ratio_B1(self.log_ratio_BT(inputs), counted)
        if self.length_epsilon:
            length_B1 = counted.sum(-1, keepdim=True).to(value.dtype)
            value = value * (length_B1 / (length_B1 + self.length_epsilon))
        if self.gradient == "token":
            value = value.detach() + gradient_carrier(inputs.logp_theta_BT)
        return value if self.sequence_clamp_nats is None else value.clamp(max=self.sequence_clamp_nats)

    def counted_BT(self, inputs: LossInputs) -> Tensor:
        """Tokens that enter the means of a sequence."""
        if self.over == "valid" or inputs.keep_BT is None:
            return inputs.mask_BT
        return inputs.mask_BT & inputs.keep_BT

    def advantage_of(self, inputs: LossInputs) -> Tensor:
        """(B, 1), or (B, T) where tokens of a sequence have their own."""
        from stalefront.ratios import over_sequence

        if self.advantage == "token" or inputs.advantage_B.dim() == 1:
            return inputs.advantage_B1
        return over_sequence(inputs.advantage_B1, self.counted_BT(inputs), "mean")

    def ratio_BT(self, inputs: LossInputs) -> Tensor:
        """The sequence ratio s, on every token."""
        return self.sequence_log_ratio(inputs).exp().expand(inputs.mask_BT.shape)
