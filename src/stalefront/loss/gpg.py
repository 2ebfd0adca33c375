"""GPG: plain policy gradient, every token counting the same (arXiv 2504.02546)."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.loss.reinforce import Reinforce


@dataclass(frozen=True)
class GPG(Reinforce):
    """(1/Σ|y|) Σ_bt −A log θ: `reinforce` with a mean over tokens.

    The paper's rescaling of advantages by the share of groups that have any is not part of it.
    """

    reduction = "token_mean"
