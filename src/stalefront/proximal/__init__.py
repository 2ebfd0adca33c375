"""Seam `proximal`: which policy stands as `old` in the ratio θ/old of a learner step."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stalefront.choice import Choice

if TYPE_CHECKING:
    from stalefront.batch import LossInputs


@dataclass(frozen=True)
class Proximal(Choice):
    """Where `old` comes from.

    Attributes
    ----------
    needs_average : class attribute
        The trainer keeps an exponentially weighted average of its parameters, and `old` is scored with it.
    needs : class attribute
        Optional fields of `LossInputs` that must be there.
    """

    needs_average: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossInputs:
        """The inputs with their `logp_old_BT` replaced; no gradient goes through it."""
