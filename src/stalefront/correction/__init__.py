"""Seam `correction`: an ordered list of rules that weight or mask tokens, or scale the step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from stalefront.choice import Choice

if TYPE_CHECKING:
    from stalefront.batch import LossInputs, Weights

Anchor = Literal["theta/mu", "old/mu", "theta/old"]


@dataclass(frozen=True)
class Correction(Choice):
    """A rule that maps loss inputs to weights.

    Attributes
    ----------
    anchor
        Which two policies' ratio the rule looks at. `theta/mu` holds lag and mismatch, `theta/old` lag alone,
        `old/mu` mismatch alone.
    level, statistic, kept_weight, detached, shrinks_denominator : class attributes
        What the rule declares about itself; every one of them differs between frameworks under one name.
    """

    anchor: Anchor

    level: ClassVar[Literal["token", "sequence", "geometric"]]
    statistic: ClassVar[str]
    kept_weight: ClassVar[Literal["1", "ratio", "geometric", "product"]]
    detached: ClassVar[bool] = True
    shrinks_denominator: ClassVar[bool] = False

    @classmethod
    def key(cls, field: str) -> str:
        """Override key of `field`."""
        return f"correction.{cls.choice()}.{field}"

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Weights:
        """Weights of one batch; pure, and without gradient unless declared."""


def chain(corrections: Sequence[Correction], inputs: LossInputs) -> Weights | None:
    """All corrections together: weights multiply, keeps AND, step scales multiply; None when there is none."""
    if not corrections:
        return None
    from stalefront.batch import Weights

    first, *rest = (correction(inputs) for correction in corrections)
    for other in rest:
        first = Weights(
            first.weight_BT * other.weight_BT,
            first.keep_BT & other.keep_BT,
            first.step_scale * other.step_scale,
        )
    return first
