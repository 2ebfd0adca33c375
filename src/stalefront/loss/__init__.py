"""Seam `loss`: a surrogate a token, a reduction, and the KL term to the reference policy."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from stalefront.choice import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs, Weights
    from stalefront.reduction import Reduction
    from stalefront.surrogate import Surrogate


class LossValue(NamedTuple):
    """Scalar to minimise (a part of the batch's when the batch is split) and where the clip was active."""

    loss: Tensor
    clip_low_BT: Tensor
    clip_high_BT: Tensor

    def detach(self) -> LossValue:
        """The same numbers without a graph."""
        return self._replace(loss=self.loss.detach())


@dataclass(frozen=True)
class Loss(Choice):
    """Base of every loss.

    Attributes
    ----------
    beta : float
        Weight of the KL term to the reference policy (k3 a token).
    use_bias_correction_kl : bool
        Multiply the KL term by the surrogate's ratio, so that it is unbiased off-policy (TRL's option and default).
    scale_rewards
        Scale of group advantages: see `stalefront.advantage`.
    ratio : class attribute
        The two policies of the ratio inside the surrogate, or None when it has none. A correction that would put
        a second ratio on top is refused.
    reduction : class attribute
        See `stalefront.reduction`.
    """

    beta: float
    use_bias_correction_kl: bool
    scale_rewards: Literal["group", "batch", "none"]

    ratio: ClassVar[str | None] = "theta/old"
    reduction: ClassVar[Reduction] = "sequence_mean"

    def check(self) -> None:
        """Beta is a weight."""
        self.require(math.isfinite(self.beta) and self.beta >= 0, "beta", "a finite number of at least 0")

    @abstractmethod
    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """Policy part of the loss, a value a token, before corrections and reduction."""

    def ratio_BT(self, inputs: LossInputs) -> Tensor:
        """Ratio that unbiases the KL term: the surrogate's own; token-level θ/old unless a loss says otherwise."""
        return inputs.log_ratio_BT.exp()

    def __call__(self, inputs: LossInputs, weights: Weights | None, reduction_BT: Tensor) -> LossValue:
        """Σ reduction · (weight · surrogate + β · k3), over the tokens that corrections keep.

        Parameters
        ----------
        weights
            None when no correction is on; the surrogate is then not multiplied by anything.
        reduction_BT : (B, T)
            Rows of the whole batch's `stalefront.reduction.reduction_BT`.
        """
        from stalefront.surrogate import kl_k3_BT

        token, low, high = self.surrogate(inputs)
        if weights is not None:
            token = token.where(weights.keep_BT, 0.0) * weights.weight_BT
        if self.beta:
            assert inputs.logp_ref_BT is not None, "the loop records reference log-probs"
            kl = kl_k3_BT(inputs.logp_theta_BT, inputs.logp_ref_BT)
            token = token + self.beta * (kl * self.ratio_BT(inputs) if self.use_bias_correction_kl else kl)
        shape = reduction_BT.shape
        return LossValue((token * reduction_BT).sum(), low.expand(shape), high.expand(shape))


@dataclass(frozen=True)
class ClippedLoss(Loss):
    """PPO's clipped surrogate at token level; the subclasses differ in their reduction."""

    epsilon: float
    epsilon_high: float | None
    delta: float | None

    def check(self) -> None:
        """Clip widths are at least 0; `inf` turns the clip off."""
        super().check()
        self.require(self.epsilon >= 0, "epsilon", "a number of at least 0, or inf for no clip")
        high = self.epsilon_high
        self.require(high is None or high >= 0, "epsilon_high", "at least 0, inf, or null for epsilon")
        legal = "a number above 1 + epsilon_high, or null"
        self.require(self.delta is None or self.delta > 1 + self.clip_high, "delta", legal)

    @property
    def clip_high(self) -> float:
        """Upper clip width: `epsilon` unless `epsilon_high` is set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See `stalefront.surrogate.clipped`."""
        from stalefront.surrogate import clipped

        return clipped(
            inputs.log_ratio_BT,
            inputs.advantage_B[:, None],
            epsilon_low=self.epsilon,
            epsilon_high=self.clip_high,
            delta=self.delta,
        )
