"""Seam `loss`: a surrogate a token, a reduction, and the KL term to the reference policy."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from stalefront.choice import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs, Weights
    from stalefront.reduction import Kind
    from stalefront.surrogate import Surrogate


OnPolicy = Literal["policy_gradient", "scaled", "other"]


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
    reduction : class attribute
        The loss's own way to make one number of token losses; the group `reduction` may set another.
    on_policy
        What the gradient is where all three policies agree: `policy_gradient` (−A ∇log θ a token), `scaled` (that times
        a constant, `on_policy_scale`), or `other`.
    unbounded
        The loss may be infinite where the policy gave a token up (log θ = −∞), by definition.
    acts_without_advantage
        There is a gradient where the advantage is 0, as from a penalty on the distance of two policies.
    needs : class attribute
        Optional fields of `LossInputs` that the surrogate reads.
    scope : class attribute
        `batch` where a row's loss depends on other rows of its micro-batch, so that a batch cannot be split exactly.
    """

    beta: float
    use_bias_correction_kl: bool
    scale_rewards: Literal["group", "batch", "none"]

    reduction: ClassVar[Kind] = "sequence_mean"
    needs: ClassVar[tuple[str, ...]] = ()
    scope: ClassVar[Literal["sequence", "batch"]] = "sequence"

    @property
    def on_policy(self) -> OnPolicy:
        """See the class."""
        return "policy_gradient"

    @property
    def unbounded(self) -> bool:
        """See the class."""
        return False

    @property
    def acts_without_advantage(self) -> bool:
        """See the class."""
        return False

    @property
    def ratio(self) -> str | None:
        """The two policies of the ratio inside the surrogate, None when it has none: no weight may hold it again."""
        return None

    @property
    def on_policy_scale(self) -> float:
        """Factor of the on-policy gradient of a `scaled` loss."""
        return 1.0

    def check(self) -> None:
        """Beta is a weight."""
        self.require(math.isfinite(self.beta) and self.beta >= 0, "beta", "a finite number of at least 0")

    @abstractmethod
    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """Policy part of the loss, a value a token, before corrections and reduction."""

    def ratio_BT(self, inputs: LossInputs) -> Tensor:
        """Ratio that unbiases the KL term: the surrogate's own; token-level θ/old where it has none."""
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
        from stalefront.batch import BatchError
        from stalefront.surrogate import kl_k3_BT

        if not len(inputs.mask_BT):
            raise BatchError("a loss of no sequences: mask_BT has 0 rows, and there is no mean of nothing")
        if weights is not None:
            inputs = replace(inputs, keep_BT=weights.keep_BT)
        token, low, high = self.surrogate(inputs)
        if weights is not None:
            # Out before the product: a rejected token may hold an infinite weight, and 0 · inf is NaN.
            token = token.where(weights.keep_BT, 0.0) * weights.weight_BT.where(weights.keep_BT, 1.0)
        if self.beta:
            assert inputs.logp_ref_BT is not None, "the loop records reference log-probs"
            kl = kl_k3_BT(inputs.logp_theta_BT, inputs.logp_ref_BT)
            token = token + self.beta * (kl * self.ratio_BT(inputs) if self.use_bias_correction_kl else kl)
        shape = reduction_BT.shape
        return LossValue((token * reduction_BT).sum(), low.expand(shape), high.expand(shape))


@dataclass(frozen=True)
class RatioLoss(Loss):
    """A surrogate that holds a ratio of two policies.

    Attributes
    ----------
    anchor
        `theta/old`, or `theta/mu` for a ratio that holds the mismatch of sampler and trainer too.
    clamp_nats : float or None
        Bound on the log-ratio's size before exp, as several frameworks have it; None for none.
    """

    anchor: Literal["theta/old", "theta/mu"]
    clamp_nats: float | None

    def check(self) -> None:
        """A clamp is positive."""
        super().check()
        self.require(self.clamp_nats is None or self.clamp_nats > 0, "clamp_nats", "a number above 0, or null")

    @property
    def ratio(self) -> str | None:
        """See `Loss`."""
        return self.anchor

    def log_ratio_BT(self, inputs: LossInputs) -> Tensor:
        """Log-ratio of the anchor's policies, with gradient."""
        value = inputs.log_ratio_of_BT(self.anchor)
        return value if self.clamp_nats is None else value.clamp(-self.clamp_nats, self.clamp_nats)

    def kept_log_ratio_BT(self, inputs: LossInputs) -> Tensor:
        """The same, and 0 on tokens that corrections reject: for surrogates in which a token stands for itself.

        A rejected token's ratio may be infinite; were it dropped after exp alone, its gradient would be 0 · inf.
        """
        value = self.log_ratio_BT(inputs)
        return value if inputs.keep_BT is None else value.where(inputs.keep_BT, 0.0)

    def ratio_BT(self, inputs: LossInputs) -> Tensor:
        """The surrogate's ratio."""
        return self.log_ratio_BT(inputs).exp()


@dataclass(frozen=True)
class ClippedLoss(RatioLoss):
    """PPO's clipped surrogate at token level; the subclasses differ in their reduction.

    Attributes
    ----------
    dual_clip : float or None
        Largest size of the loss's ratio at negative advantages: −max(min(r A, clip(r) A), c A) (arXiv 1912.09729).
    value_cap : float or None
        Upper cap on the ratio's value that leaves its gradient, unlike `delta`.
    """

    epsilon: float
    epsilon_high: float | None
    delta: float | None
    dual_clip: float | None
    value_cap: float | None

    def check(self) -> None:
        """Clip widths are at least 0; `inf` turns the clip off."""
        super().check()
        self.require(self.epsilon >= 0, "epsilon", "a number of at least 0, or inf for no clip")
        high = self.epsilon_high
        self.require(high is None or high >= 0, "epsilon_high", "at least 0, inf, or null for epsilon")
        legal = "a number above 1 + epsilon_high, or null"
        self.require(self.delta is None or self.delta > 1 + self.clip_high, "delta", legal)
        self.require(self.dual_clip is None or self.dual_clip > 1, "dual_clip", "a number above 1, or null")
        self.require(self.value_cap is None or self.value_cap > 1, "value_cap", "a number above 1, or null")

    @property
    def clip_high(self) -> float:
        """Upper clip width: `epsilon` unless `epsilon_high` is set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See `stalefront.surrogate.clipped`."""
        return self.clipped(self.kept_log_ratio_BT(inputs), inputs.advantage_B1)

    def clipped(self, log_ratio: Tensor, advantage_B1: Tensor) -> Surrogate:
        """The clip of this loss's fields on a log-ratio of tokens (B, T) or sequences (B, 1)."""
        from stalefront.surrogate import clipped

        return clipped(
            log_ratio,
            advantage_B1,
            epsilon_low=self.epsilon,
            epsilon_high=self.clip_high,
            delta=self.delta,
            dual_clip=self.dual_clip,
            value_cap=self.value_cap,
        )
