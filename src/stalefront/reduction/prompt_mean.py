"""Token mean of each prompt's samples, then over prompts."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.reduction import Reduction


@dataclass(frozen=True)
class PromptMean(Reduction):
    """See `stalefront.reduction.reduction_BT`."""

    kind = "prompt_mean"
