"""`old` is what the sampler wrote down: no forward of the sampling weights stands in the ratio."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stalefront.proximal import Proximal

if TYPE_CHECKING:
    from stalefront.batch import LossInputs


@dataclass(frozen=True)
class Engine(Proximal):
    """old = μ, as the inference engine reported it: θ/old then holds lag and mismatch at once.

    What saves a forward elsewhere is here still computed, for the record alone (`mismatch_var_share`).
    """

    def __call__(self, inputs: LossInputs) -> LossInputs:
        """The inputs with μ in the place of old."""
        return replace(inputs, logp_old_BT=inputs.logp_behav_BT)
