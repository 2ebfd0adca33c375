"""VCPO: a smaller step where few sequences carry the importance weights of the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stalefront.choice import OptionError
from stalefront.controller import Controller, Decision, Memory, Step

if TYPE_CHECKING:
    from stalefront.cell import Cell

MEASURED = "measured"


@dataclass(frozen=True)
class VCPO(Controller):
    """lr × min(1, (ESS/B) / base)^power with w = Π_t θ/μ over a sequence, ESS = (Σw)² / (Σw² + 1e-8).

    B counts the sequences of the learner step. The formulas are those of the public code (mit-han-lab/vcpo,
    `staleness_utils.py`, where base is 1, power 0.5 and the weights are not clipped); its baseline is
    `stalefront.vcpo.opob_baseline`, which the loop does not use.

    Attributes
    ----------
    base : float or `measured`
        Share of effective sequences at which the rate stays whole. `measured` takes ESS/B of the first learner step on
        each rollout batch, the one nearest to the weights that sampled it; that step keeps its rate, and the later
        steps on the batch are compared with it.
    power : float
        0.5 (for Adam) or 1.
    clip : float or None
        Upper bound on the weights; None for none.
    """

    base: float | str
    power: float
    clip: float | None

    def check(self) -> None:
        """A base is a share."""
        base = self.base
        ok = base == MEASURED if isinstance(base, str) else 0 < base <= 1
        self.require(ok, "base", f"a number above 0 and at most 1, or {MEASURED}")
        self.require(math.isfinite(self.power) and self.power > 0, "power", "a finite number above 0", "0.5 is usual.")
        self.require(self.clip is None or self.clip > 0, "clip", "a number above 0, or null for none")

    def refuse(self, cell: Cell) -> None:
        """A measured base needs a second step on a batch."""
        if self.base == MEASURED and cell.delay.choice() != "reuse":
            legal = f"a number with delay={cell.delay.choice()}"
            way_out = (
                "Every batch serves one step there, which would be compared with itself: set a base, or delay=reuse."
            )
            raise OptionError(self.key("base"), self.base, legal, way_out)

    def start(self, cell: Cell) -> Memory:
        """Nothing is measured yet."""
        return Measured(self)


class Measured(Memory):
    """The base in use, and what this step's effective sample size is."""

    def __init__(self, options: VCPO) -> None:
        self.options = options
        self.base = math.nan if isinstance(options.base, str) else options.base
        self.share = self.scale = math.nan

    def decide(self, now: Step) -> Decision:
        """Scale the rate."""
        from stalefront.vcpo import ess, log_weights_B, lr_scale

        log_weight_B = log_weights_B(now.inputs.anchored_BT("theta/mu"), now.inputs.mask_BT)
        self.share = ess(log_weight_B, clip=self.options.clip) / len(log_weight_B)
        if self.options.base == MEASURED and now.first_of_batch:
            self.base = self.share
        self.scale = lr_scale(self.share, base=self.base, power=self.options.power)
        return Decision(scale=self.scale)

    def columns(self) -> dict[str, Any]:
        """Share of effective sequences, its base, and the scale they give."""
        return {"vcpo_ess_frac": self.share, "vcpo_base": self.base, "vcpo_scale": self.scale}

    def state_dict(self) -> dict[str, Any]:
        """The base of the batch in use."""
        return {"base": self.base}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.base = state["base"]
