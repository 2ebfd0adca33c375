"""Seam `correction`: an ordered list of rules that weight or mask tokens, or scale the step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from stalefront.choice import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs, Weights

Anchor = Literal["theta/mu", "old/mu", "theta/old"]
# What a token is judged by: see `stalefront.ratios`.
Statistic = Literal["ratio", "inverse_ratio", "k2", "k3", "inverse_k3", "difference"]
Aggregate = Literal["mean", "sum", "max"]
# Tokens that a statistic of a sequence is taken over: every completion token, or those that the rules before left.
Over = Literal["valid", "kept"]


def neutral(kind: Statistic) -> float:
    """Value of a statistic, in the units of its bounds, where both policies agree."""
    return 1.0 if kind in ("ratio", "inverse_ratio") else 0.0


@dataclass(frozen=True)
class Correction(Choice):
    """A rule that maps loss inputs to weights, and sees what the rules before it said.

    Attributes
    ----------
    level, looks_at, bounds, kept_weight, detached, needs, scope : class attributes
        What the rule declares about itself; every one of them differs between frameworks under one name. `bounds` says
        whether a value on a bound is kept (`inclusive`) or not (`strict`); `option` where a field says it, as for
        `kept_weight`. `needs` names optional fields of `LossInputs`. `scope` is `batch` where a row's weight depends on
        other rows, so that a batch cannot be split.
    """

    level: ClassVar[Literal["token", "segment", "sequence", "batch"]]
    looks_at: ClassVar[str]
    bounds: ClassVar[Literal["inclusive", "strict", "option", "none"]] = "none"
    kept_weight: ClassVar[str]
    detached: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ()
    scope: ClassVar[Literal["sequence", "batch"]] = "sequence"

    @classmethod
    def key(cls, field: str) -> str:
        """Override key of `field`."""
        return f"correction.{cls.choice()}.{field}"

    @property
    def is_weight(self) -> bool:
        """True when tokens are multiplied by something other than 0 and 1."""
        return self.kept_weight != "1"

    @property
    def unbounded(self) -> bool:
        """The weight may be infinite where a log-ratio is, by what the options say."""
        return False

    @abstractmethod
    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """`so_far` with this rule added; pure, and without gradient unless declared."""


@dataclass(frozen=True)
class RatioCorrection(Correction):
    """A rule that looks at the ratio of two policies.

    Attributes
    ----------
    anchor
        Which two policies. `theta/mu` holds lag and mismatch, `theta/old` lag alone, `old/mu` mismatch alone.
    clamp_nats : float or None
        Bound on the log-ratio's size before anything else, as several frameworks have it (20 in most); None for none.
    """

    anchor: Anchor
    clamp_nats: float | None

    def check(self) -> None:
        """A clamp is positive."""
        self.require(self.clamp_nats is None or self.clamp_nats > 0, "clamp_nats", "a number above 0, or null")

    def log_ratio_BT(self, inputs: LossInputs) -> Tensor:
        """Detached log-ratio of the anchor's two policies, clamped where that is asked for."""
        value = inputs.anchored_BT(self.anchor)
        return value if self.clamp_nats is None else value.clamp(-self.clamp_nats, self.clamp_nats)

    def statistic_BT(self, inputs: LossInputs, kind: Statistic) -> Tensor:
        """Detached statistic of every token, ratios as logs; `clamp_nats` does not reach `difference`."""
        from stalefront.ratios import probability_difference, token_statistic

        if kind == "difference":
            top_BT, bottom_BT = inputs.policies_BT(self.anchor)
            return probability_difference(top_BT.detach(), bottom_BT.detach())
        return token_statistic(self.log_ratio_BT(inputs), kind)

    def require_bounds(
        self,
        low: float | None,
        high: float | None,
        kind: Statistic,
        *,
        inclusive: bool = True,
        largest: float = math.inf,
    ) -> None:
        """Refuse a band that rejects what both policies agree on, or nothing.

        `largest` is the size the statistic reaches; only a difference is ever below 0.
        """
        agreed = neutral(kind)
        legal = f"a number {'of at most' if inclusive else 'below'} {agreed:g}, or null for no bound"
        below = low is None or (low <= agreed if inclusive else low < agreed)
        self.require(below, "low", legal, "Tokens that both policies agree on must stay.")
        legal = f"a number {'of at least' if inclusive else 'above'} {agreed:g}, or null for no bound"
        above = high is None or (high >= agreed if inclusive else high > agreed)
        self.require(above, "high", legal, "Tokens that both policies agree on must stay.")
        smallest = -largest if kind == "difference" else 0.0
        acts = (low is not None and low > smallest) or (high is not None and high < largest)
        legal = "a bound on at least one side, within what the statistic reaches"
        self.require(acts, "high", legal, f"With low={low} it never acts.")


@dataclass(frozen=True)
class TruncatedRatio(RatioCorrection):
    """Truncated importance sampling: a ratio within bounds is the weight, and nothing is rejected.

    Attributes
    ----------
    cap, floor : float
        Bounds of the weight; the cap may be infinite.
    """

    cap: float
    floor: float

    kept_weight = "clamped ratio"

    def check(self) -> None:
        """Bounds that leave 1 alone: others would shrink or stretch on-policy weights."""
        super().check()
        self.require(self.cap >= 1, "cap", "a number of at least 1, or inf", "2 is the common value.")
        self.require(0 <= self.floor <= 1, "floor", "a number from 0 to 1", "0 is no lower bound.")

    @property
    def unbounded(self) -> bool:
        """Without a cap or a clamp."""
        return self.cap == math.inf and self.clamp_nats is None


@dataclass(frozen=True)
class TruncatedSequenceRatio(TruncatedRatio):
    """One clamped weight a sequence, of the `aggregate` of its tokens' log-ratios; nothing is rejected.

    Attributes
    ----------
    over
        `valid`: all tokens of a sequence enter; `kept`: those that the rules before left, as in SkyRL.
    """

    over: Over

    level = "sequence"
    looks_at = "ratio"
    aggregate: ClassVar[Aggregate]

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """The same weight on every token of a sequence; 1 where no token enters."""
        from stalefront.correction.token_tis import truncated_ratio
        from stalefront.ratios import over_sequence

        log_ratio_B1 = over_sequence(self.log_ratio_BT(inputs), counted_BT(inputs, so_far, self.over), self.aggregate)
        return so_far.times(truncated_ratio(log_ratio_B1, cap=self.cap, floor=self.floor))


def counted_BT(inputs: LossInputs, so_far: Weights, over: Over) -> Tensor:
    """Tokens that a statistic of a sequence is taken over: all of them, or those still kept."""
    return inputs.mask_BT if over == "valid" else inputs.mask_BT & so_far.keep_BT


def chain(
    corrections: Sequence[Correction],
    inputs: LossInputs,
    watch: Callable[[str, Weights, Weights], None] | None = None,
) -> Weights | None:
    """All corrections in order: weights multiply, keeps AND, step scales multiply; None when there is none.

    The result also says which rule took each token away. A batch without a token position is a `BatchError`. `watch` is
    told the name of every rule, and the weights before and after it.
    """
    import torch

    from stalefront.batch import BatchError, Weights

    if not inputs.mask_BT.numel():
        raise BatchError(f"a batch of shape {tuple(inputs.mask_BT.shape)} holds nothing to weight")
    if not corrections:
        return None
    weights = Weights.ones(inputs)
    removed_by_BT = torch.zeros_like(inputs.mask_BT, dtype=torch.int8)
    for number, correction in enumerate(corrections, start=1):
        before, weights = weights, correction(inputs, weights)
        if watch is not None:
            watch(correction.choice(), before, weights)
        removed_by_BT[~weights.counts_BT & (removed_by_BT == 0)] = number
    return replace(weights, removed_by_BT=removed_by_BT, rules=tuple(rule.choice() for rule in corrections))
