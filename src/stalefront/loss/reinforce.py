"""REINFORCE on stale samples: no ratio, no clip; what corrections that bring their own ratio build on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stalefront.loss import Loss

if TYPE_CHECKING:
    from stalefront.batch import LossInputs
    from stalefront.reduction import Kind
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class Reinforce(Loss):
    """(1/B) Σ_b (1/|y_b|) Σ_t −A log θ.

    On-policy its gradient is GRPO's, since ∇r = ∇log θ at r = 1. Off-policy it is biased, and the bias is what a
    correction such as token TIS removes.
    """

    reduction: ClassVar[Kind] = "sequence_mean"

    @property
    def unbounded(self) -> bool:
        """−A log θ is infinite at log θ = −∞."""
        return True

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See `stalefront.surrogate.policy_gradient`."""
        from stalefront.surrogate import policy_gradient

        return policy_gradient(inputs.logp_theta_BT, inputs.advantage_B1)
