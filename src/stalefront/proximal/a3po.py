"""A-3PO: `old` interpolated between the sampling and the present policy, by how far a token's version lags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from stalefront.proximal import Proximal

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs


def interpolation_BT(lag_BT: Tensor) -> Tensor:
    """a = clamp((d − 1)/d, 0, 1) at a lag of d updates: 0 at d = 1, towards 1 as d grows.

    The policy one update before the present one is meant, so a token of lag 1 was sampled by it. A lag of 0 or less
    (the present weights, or a version that is not known) has a = 0.
    """
    lag = lag_BT.float()
    positive = lag > 0
    share = (lag - 1) / torch.where(positive, lag, torch.ones_like(lag))
    return torch.where(positive, share, torch.zeros_like(lag)).clamp(0, 1)


def loglinear(logp_behav_BT: Tensor, logp_theta_BT: Tensor, share_BT: Tensor) -> Tensor:
    """log π = log μ + a (log θ − log μ); log μ itself where a = 0, so that an infinite log θ stays out of it."""
    between = logp_behav_BT + share_BT * (logp_theta_BT - logp_behav_BT)
    return torch.where(share_BT == 0, logp_behav_BT, between)


def linear(logp_behav_BT: Tensor, logp_theta_BT: Tensor, share_BT: Tensor, *, offset: float) -> Tensor:
    """log π = log((1 − a) μ + a θ + offset)."""
    return torch.log((1 - share_BT) * logp_behav_BT.exp() + share_BT * logp_theta_BT.exp() + offset)


@dataclass(frozen=True)
class A3PO(Proximal):
    """log old from log μ, log θ and the lag: no forward of an older version is needed (A-3PO, arXiv 2512.06547).

    Attributes
    ----------
    method
        `loglinear` interpolates log-probs, `linear` probabilities.
    offset : float
        Added to the probability before its logarithm is taken; `linear` alone. AReaL has 1e-10.
    """

    method: Literal["loglinear", "linear"]
    offset: float

    needs = ("lag_BT",)

    def check(self) -> None:
        """An offset is a small probability."""
        self.require(0 <= self.offset < 1, "offset", "a number of at least 0 and below 1", "0 adds nothing.")

    def __call__(self, inputs: LossInputs) -> LossInputs:
        """The inputs with `logp_old_BT` interpolated; θ enters detached."""
        assert inputs.lag_BT is not None, "A-3PO needs the lag of every token"
        behav, theta = inputs.logp_behav_BT, inputs.logp_theta_BT.detach()
        share_BT = interpolation_BT(inputs.lag_BT)
        if self.method == "loglinear":
            return replace(inputs, logp_old_BT=loglinear(behav, theta, share_BT))
        return replace(inputs, logp_old_BT=linear(behav, theta, share_BT, offset=self.offset))
