"""REINFORCE with a clamped importance weight from the sampler's policy: PipelineRL's loss, LlamaRL's AIPO."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.loss._families import ClampedWeight


@dataclass(frozen=True)
class ReinforceClamp(ClampedWeight):
    """(1/B) Σ_bt −sg[clamp(r, floor, cap)] A log θ, with r = θ/μ by default.

    The formula is CISPO's; ratio, bounds and reduction differ. PipelineRL (arXiv 2509.19128) divides by a fixed number
    of sequences and caps at 5 in the paper, 1.02 in its base configuration; AIPO (arXiv 2505.24034) caps at 2 to 10.
    """

    floor: float
    cap: float

    reduction = "sequence_sum"

    def check(self) -> None:
        """Both are weights, in order."""
        super().check()
        self.require(self.cap > 0, "cap", "a number above 0, or inf", "It is the largest weight itself.")
        self.require(0 <= self.floor <= self.cap, "floor", "a number from 0 to cap")

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest weight."""
        return self.floor, self.cap
