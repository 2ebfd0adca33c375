"""A sampler at another temperature than the trainer's log-probs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.mismatch import Noise, Processing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Temperature(Processing):
    """Logits, already at the task's temperature, divided by temperature^strength.

    Attributes
    ----------
    temperature : float
        The sampler's, as a multiple of the task's.
    """

    temperature: float

    def check(self) -> None:
        """A positive temperature other than the task's."""
        super().check()
        ok = math.isfinite(self.temperature) and self.temperature > 0 and self.temperature != 1
        self.require(ok, "temperature", "a finite number above 0 other than 1, a multiple of task.temperature")

    def __call__(self, logits_BV: Tensor, noise: Noise) -> Tensor:
        """Sharper or flatter logits."""
        from stalefront.support import tempered

        return tempered(logits_BV, self.temperature, self.strength)
