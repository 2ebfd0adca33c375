"""Bases of losses that share a formula: a clamped weight, a penalty in place of a clip, a trust region as a mask."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stalefront.loss import OnPolicy, RatioLoss

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs
    from stalefront.reduction import Kind
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class ClampedWeight(RatioLoss):
    """−sg[clamp(r, floor, cap)] A log θ; the subclasses name the two bounds and choose the reduction."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest weight."""
        raise NotImplementedError

    @property
    def on_policy(self) -> OnPolicy:
        """A cap below 1, or a floor above it, scales every token."""
        return "policy_gradient" if self.on_policy_scale == 1 else "scaled"

    @property
    def on_policy_scale(self) -> float:
        """The weight of r = 1."""
        floor, cap = self.bounds
        return min(max(1.0, floor), cap)

    @property
    def unbounded(self) -> bool:
        """A floor leaves a weight on log θ = −∞."""
        return self.bounds[0] > 0

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See `stalefront.surrogate.clamped_weight`."""
        from stalefront.surrogate import clamped_weight

        floor, cap = self.bounds
        log_ratio = self.kept_log_ratio_BT(inputs)
        return clamped_weight(inputs.logp_theta_BT, log_ratio, inputs.advantage_B1, floor=floor, cap=cap)


@dataclass(frozen=True)
class PenalisedLogp(RatioLoss):
    """−A log θ + c (log r)²: a policy gradient without importance weight, held near the anchor by a penalty."""

    @property
    def unbounded(self) -> bool:
        """Both terms are infinite at log θ = −∞."""
        return True

    @property
    def acts_without_advantage(self) -> bool:
        """The penalty does."""
        return True

    def penalised(self, inputs: LossInputs, weight: float) -> Surrogate:
        """The two terms, with `weight` c."""
        from stalefront.surrogate import policy_gradient

        value = policy_gradient(inputs.logp_theta_BT, inputs.advantage_B1)
        penalty = weight * self.kept_log_ratio_BT(inputs).square()
        return value._replace(token_loss_BT=value.token_loss_BT + penalty)


@dataclass(frozen=True)
class MaskedRatioLoss(RatioLoss):
    """−A r, or −sg[r] A log θ, on tokens inside a trust region; the subclasses say what lies `outside` of it."""

    reduction: ClassVar[Kind] = "token_mean"

    @property
    def penalty(self) -> float:
        """Weight of (log r)², on tokens outside too."""
        return 0.0

    @property
    def ratio_cap(self) -> float | None:
        """Upper cap on the ratio's value that leaves its gradient."""
        return None

    @property
    def unbounded(self) -> bool:
        """Through the penalty alone."""
        return self.penalty > 0

    @property
    def acts_without_advantage(self) -> bool:
        """The penalty does."""
        return self.penalty > 0

    @abstractmethod
    def outside(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Tokens that are out because they fell, and because they rose, too far: two bool (B, T), without gradient."""

    def weight_log_BT(self, inputs: LossInputs) -> Tensor:
        """Logarithm of the weight of a token that stays in."""
        return self.log_ratio_BT(inputs)

    def base_BT(self, inputs: LossInputs) -> Tensor:
        """Log-prob of the anchor's lower policy."""
        return inputs.logp_old_BT if self.anchor == "theta/old" else inputs.logp_behav_BT

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """−A r inside, plus the penalty everywhere."""
        from stalefront.surrogate import Surrogate, value_capped

        low, high = self.outside(inputs)
        # Masked before exp: the ratio of a token that is out may be infinite, and 0 · inf is NaN.
        log_weight = self._kept(self.weight_log_BT(inputs), inputs).where(~(low | high), 0.0)
        loss = -inputs.advantage_B1 * value_capped(log_weight, self.ratio_cap)
        return Surrogate(self._penalised(loss.where(~(low | high), 0.0), inputs), low, high)

    def weighted(self, inputs: LossInputs) -> Surrogate:
        """−sg[r] A log θ inside, plus the penalty everywhere; the same gradient as `surrogate`."""
        import torch

        from stalefront.surrogate import Surrogate, value_capped, weighted_logp

        low, high = self.outside(inputs)
        weight = value_capped(self._kept(self.weight_log_BT(inputs).detach(), inputs), self.ratio_cap)
        weight = torch.where(low | high, torch.zeros_like(weight), weight)
        loss = weighted_logp(inputs.logp_theta_BT, weight, inputs.advantage_B1)
        return Surrogate(self._penalised(loss, inputs), low, high)

    def _penalised(self, loss_BT: Tensor, inputs: LossInputs) -> Tensor:
        return loss_BT + self.penalty * self.kept_log_ratio_BT(inputs).square() if self.penalty else loss_BT

    def _kept(self, log_weight_BT: Tensor, inputs: LossInputs) -> Tensor:
        return log_weight_BT if inputs.keep_BT is None else log_weight_BT.where(inputs.keep_BT, 0.0)
