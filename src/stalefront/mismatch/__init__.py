"""Seam `mismatch`: an ordered list of what makes the sampler another policy than the trainer, or its log other numbers.

Every entry has a `strength`: 1 is the thing its options describe, 0 is nothing, bit for bit, and what lies between (or
beyond) is that much of its error. `mismatch.target_kl` multiplies all strengths by one factor, found before the run.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self

from stalefront.choice import Choice

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from stalefront.cell import Cell
    from stalefront.routing import RouterChange

Place = Literal["weights", "head", "router", "cache", "path", "draw", "log", "text"]


class Noise(NamedTuple):
    """Source of random numbers of one column of a rollout: keyed by row and column, never by what else is sampled.

    Attributes
    ----------
    key_B : int64 (B,)
        One key a row, for the entry that asks.
    column : int
        Completion column, from 0.
    """

    key_B: Tensor
    column: int

    def normals(self, width: int) -> Tensor:
        """Standard normal numbers, float32 (B, width)."""
        from stalefront.noise import normals

        return normals(self.key_B, self.column, width)


@dataclass(frozen=True)
class Mismatch(Choice):
    """One difference between sampler and trainer.

    Attributes
    ----------
    strength : float
        Factor on the error that the entry makes; 0 is none.
    place : class attribute
        Where it acts: the sampler's weights (and activations), its head, its routers, its key-value cache, the path its
        numbers take, the distribution it draws from, the number it writes down, or the text it hands over.
    largest : class attribute
        Largest strength that means anything.
    needs_experts : class attribute
        It acts on routers, so the model must have some that are understood.
    """

    strength: float

    place: ClassVar[Place]
    largest: ClassVar[float] = math.inf
    needs_experts: ClassVar[bool] = False

    @classmethod
    def key(cls, field: str) -> str:
        """Override key of `field`."""
        return f"mismatch.{cls.choice()}.{field}"

    def check(self) -> None:
        """A strength is a finite number within reach."""
        legal = "a finite number of at least 0" + (f" and at most {self.largest:g}" if self.largest < math.inf else "")
        ok = math.isfinite(self.strength) and 0 <= self.strength <= self.largest
        self.require(ok, "strength", legal, "1 is the thing itself, 0 is none.")

    def require_scale(self, field: str) -> None:
        """Raise `OptionError` unless `field` is a finite number above 0."""
        value = getattr(self, field)
        self.require(math.isfinite(value) and value > 0, field, "a finite number above 0", "strength=0 is none.")

    def refuse(self, cell: Cell) -> None:
        """Raise `OptionError` where the entry cannot act in `cell`."""

    @property
    def own_module(self) -> bool:
        """The sampler needs a module of its own, whose weights or forward differ from the trainer's."""
        return self.place in ("weights", "head")

    @property
    def older_pushes(self) -> int:
        """How many weight pushes back the sampler looks; 0 for the weights it was given alone."""
        return 0

    @property
    def changes_draws(self) -> bool:
        """Tokens are drawn from another distribution; otherwise only what is handed over differs."""
        return self.place not in ("log", "text")

    def scaled(self, factor: float) -> Self:
        """The same with `factor` times its strength, at most `largest`."""
        return dataclasses.replace(self, strength=min(self.strength * factor, self.largest))


@dataclass(frozen=True)
class Rounding(Mismatch):
    """Weights, and activations where asked, in fewer bits: W + strength · (rounded(W) − W), computed in the type of W.

    Matrices of linear layers and of experts are rounded; embeddings, norms, biases and the gates of routers are not.

    Attributes
    ----------
    head : bool
        The language-model head is rounded too.
    """

    head: bool

    place = "weights"

    def check_width(self, name: str, width: int) -> None:
        """Raise `OptionError` where the matrix `name`, with so many inputs, cannot be rounded."""

    @property
    def rounds_inputs(self) -> bool:
        """What goes into the matrices is rounded as well."""
        return False

    @abstractmethod
    def rounded(self, weight: Tensor) -> Tensor:
        """`weight` (…, out, in) in fewer bits, in its own type."""

    def rounded_input(self, x: Tensor) -> Tensor:
        """Input (…, in) of a matrix in fewer bits, in its own type."""
        return x

    def weight(self, weight: Tensor) -> Tensor:
        """`weight` with this entry's share of the rounding error."""
        from stalefront.rounding import blended

        return blended(weight, self.rounded(weight), self.strength)

    def entering(self, x: Tensor) -> Tensor:
        """`x` with this entry's share of the rounding error."""
        from stalefront.rounding import blended

        return blended(x, self.rounded_input(x), self.strength) if self.rounds_inputs else x


@dataclass(frozen=True)
class Routing(Mismatch):
    """Something about the choice of experts while sampling."""

    place = "router"
    needs_experts = True

    @abstractmethod
    def change(self, key_N: Tensor, position_N: Tensor) -> RouterChange:
        """What to do to the routers in a forward over N tokens, with a key a row and the tokens' positions."""


@dataclass(frozen=True)
class Processing(Mismatch):
    """What is done to the logits before a token is drawn.

    Attributes
    ----------
    logged
        `processed`: the log-prob written down is that of the distribution drawn from. `raw`: as if this entry were not
        there, as engines do that log before they process; K1 to K3 then cannot see it.
    """

    logged: Literal["processed", "raw"]

    place = "draw"

    @abstractmethod
    def __call__(self, logits_BV: Tensor, noise: Noise) -> Tensor:
        """Logits at the sampling temperature, float32, processed."""

    def logs(self, logged_BV: Tensor, drawn_BV: Tensor, noise: Noise) -> Tensor:
        """The same done to the logits that are written down, where an entry before has made them differ."""
        return self(logged_BV, noise)

    def keep_BV(self, logits_BV: Tensor) -> Tensor | None:
        """Tokens that stay possible, where the trainer is to be told; None elsewhere."""
        return None


@dataclass(frozen=True)
class Truncation(Processing):
    """A sampler that cuts the tail: what it cuts keeps the share 1 − strength of its probability.

    Attributes
    ----------
    keep_mask : bool
        The kept tokens are recorded, and the trainer's log-probs, old and θ, are those of the policy restricted to
        them ("keep sampling mask", DeepSeek-V3.2). Needs the whole cut: strength 1.
    """

    keep_mask: bool

    largest = 1.0

    def check(self) -> None:
        """A mask can be kept of a whole cut alone."""
        super().check()
        whole = not self.keep_mask or self.strength == 1
        self.require(whole, "strength", "1 with keep_mask=true", "What is cut in part has no support to replay.")

    def refuse(self, cell: Cell) -> None:
        """A mask has nothing to correct where raw log-probs are written down for the whole vocabulary."""
        legal = "null with keep_mask=true, which needs the cut as it is"
        if self.keep_mask and cell.target_kl is not None:
            from stalefront.choice import OptionError

            raise OptionError("mismatch.target_kl", cell.target_kl, legal)
        self.require(not (self.keep_mask and self.logged == "raw"), "logged", "processed with keep_mask=true")
        others = [entry.choice() for entry in cell.mismatch if entry.place == "text"]
        legal = f"false beside {', '.join(others)}"
        way_out = "Tokens that are encoded again have no support that anybody recorded."
        self.require(not (self.keep_mask and others), "keep_mask", legal, way_out)

    @abstractmethod
    def kept_BV(self, logits_BV: Tensor) -> Tensor:
        """Tokens that the whole cut leaves."""

    def __call__(self, logits_BV: Tensor, noise: Noise) -> Tensor:
        """log p, with log(1 − strength) added where a token is cut."""
        from stalefront.support import attenuated

        return attenuated(logits_BV, self.kept_BV(logits_BV), self.strength)

    def logs(self, logged_BV: Tensor, drawn_BV: Tensor, noise: Noise) -> Tensor:
        """What is cut is decided by what is drawn from: a drawn token is never written down as impossible."""
        from stalefront.support import attenuated

        return attenuated(logged_BV, self.kept_BV(drawn_BV), self.strength)

    def keep_BV(self, logits_BV: Tensor) -> Tensor | None:
        """Tokens that the cut leaves, with `keep_mask`."""
        return self.kept_BV(logits_BV) if self.keep_mask else None


@dataclass(frozen=True)
class Path(Mismatch):
    """Another way to the same logits: ℓ + strength · (ℓ of this way − ℓ), both ways being run unless strength is 1."""

    place = "path"

    def refuse(self, cell: Cell) -> None:
        """One way at a time, and with a cache of its own."""
        from stalefront.choice import OptionError

        others = [entry for entry in cell.mismatch if entry is not self and entry.place in ("path", "cache")]
        for other in others:
            legal = f"a list without {other.choice()} beside {self.choice()}"
            raise OptionError("mismatch", [e.choice() for e in cell.mismatch], legal, "Take one of the two.")


@dataclass(frozen=True)
class HalfPath(Path):
    """Parameters and everything computed from them in a type of 16 bits."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type."""


@dataclass(frozen=True)
class Logging(Mismatch):
    """What becomes of a log-prob on its way into the log: the sampler is not another one."""

    place = "log"

    @abstractmethod
    def __call__(self, logp_B: Tensor, noise: Noise) -> Tensor:
        """Numbers written down for `logp_B`."""
