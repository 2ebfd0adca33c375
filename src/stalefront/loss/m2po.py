"""M2PO: PPO's clip with bounds that keep the second moment of harmful log-ratios in a budget (arXiv 2510.01161)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.loss import RatioLoss

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class M2PO(RatioLoss):
    """(1/Σ|y|) Σ_bt −min(r A, clip(r, e^−τ, e^τ) A), τ from `stalefront.trust_region.second_moment_bound_nats`.

    Harmful tokens are those that the clip could act on: r > 1 with A > 0, r < 1 with A < 0. As in the authors' code the
    bounds are those of each micro-batch, so that the loss depends on how a batch is split. The rule that masks the
    largest log-ratios regardless of sign goes by the same name in AReaL, and is a correction.

    Attributes
    ----------
    budget : float
        Largest mean of (log r)² over harmful tokens, nats².
    miniclip_low, miniclip_high : float or None
        Clip widths that the bounds are never tighter than; None for none.
    """

    budget: float
    miniclip_low: float | None
    miniclip_high: float | None

    reduction = "token_mean"
    scope = "batch"

    def check(self) -> None:
        """Budget and widths are positive."""
        super().check()
        self.require(self.budget > 0, "budget", "a number above 0, or inf for no clip")
        for field in ("miniclip_low", "miniclip_high"):
            value = getattr(self, field)
            self.require(value is None or value >= 0, field, "a clip width of at least 0, or null")

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See `stalefront.surrogate.clipped`."""
        from stalefront.surrogate import clipped

        low, high = self.widths(inputs)
        log_ratio = self.kept_log_ratio_BT(inputs)
        return clipped(log_ratio, inputs.advantage_B1, epsilon_low=low, epsilon_high=high)

    def widths(self, inputs: LossInputs) -> tuple[float, float]:
        """Lower and upper clip width, 1 − e^−τ and e^τ − 1, or the floors under them.

        e^±τ is rounded to float32, as the authors' is: the token that sets τ lies on a bound, and the rounding decides
        its side.
        """
        import torch

        from stalefront.trust_region import second_moment_bound_nats

        log_ratio = self.kept_log_ratio_BT(inputs).detach()
        bound = second_moment_bound_nats(log_ratio[self._harmful(log_ratio, inputs)].square(), self.budget)
        nats = torch.tensor([-bound, bound], dtype=torch.float32)
        below, above = torch.exp(nats).tolist()
        return max(1 - below, self.miniclip_low or 0.0), max(above - 1, self.miniclip_high or 0.0)

    def _harmful(self, log_ratio_BT: Tensor, inputs: LossInputs) -> Tensor:
        tiny, advantage = 1e-12, inputs.advantage_B1
        up, down = (advantage > tiny) & (log_ratio_BT > tiny), (advantage < -tiny) & (log_ratio_BT < -tiny)
        return (up | down) & inputs.mask_BT
