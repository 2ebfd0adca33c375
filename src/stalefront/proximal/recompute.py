"""`old` is the trainer's own forward with the weights that sampled: the exact behaviour policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.proximal import Proximal

if TYPE_CHECKING:
    from stalefront.batch import LossInputs


@dataclass(frozen=True)
class Recompute(Proximal):
    """log old as it was computed when the batch was made."""

    def __call__(self, inputs: LossInputs) -> LossInputs:
        """Nothing is replaced."""
        return inputs
