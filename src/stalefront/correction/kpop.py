"""KPop: tokens on which the two policies' binary KL divergence is small, in both directions, keep their ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalefront.correction import RatioCorrection

if TYPE_CHECKING:
    from stalefront.batch import LossInputs, Weights


@dataclass(frozen=True)
class KPop(RatioCorrection):
    """Keep a token iff max(KL(p ‖ q), KL(q ‖ p)) ≤ upper, of the two policies' {sampled token, all others}.

    In AReaL's rejection sampling as `binary_kl`. The divergences see probabilities, not the ratio alone: a rare token
    may have any ratio.

    Attributes
    ----------
    upper : float
        Largest divergence, in nats.
    weight
        What a kept token is multiplied by: its `ratio`, or `one`.
    smoothing : float
        Probabilities are held within [smoothing, 1 − smoothing] for the divergences; 0 leaves them what they are.
    """

    upper: float
    weight: Literal["ratio", "one"]
    smoothing: float

    level = "token"
    looks_at = "binary KL"
    bounds = "inclusive"
    kept_weight = "option"

    def check(self) -> None:
        """A divergence is at least 0."""
        super().check()
        self.require(0 <= self.upper < float("inf"), "upper", "a finite number of at least 0, in nats")
        self.require(0 <= self.smoothing < 0.5, "smoothing", "a number of at least 0 and below 0.5")

    @property
    def is_weight(self) -> bool:
        """Unless the kept have weight 1."""
        return self.weight != "one"

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """Tokens beyond the bound are dropped."""
        import torch

        from stalefront.ratios import bernoulli_kl, inside

        top, bottom = (logp.detach() for logp in inputs.policies_BT(self.anchor))
        if self.smoothing:
            top, bottom = (logp.exp().clamp(self.smoothing, 1 - self.smoothing).log() for logp in (top, bottom))
        keep = inside(torch.maximum(bernoulli_kl(top, bottom), bernoulli_kl(bottom, top)), None, self.upper)
        weights = so_far
        if self.is_weight:
            weights = weights.times(self.log_ratio_BT(inputs).exp().where(keep, 0.0))
        return weights.keeping(keep)
