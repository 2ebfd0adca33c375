"""Division by a fixed length, so that no length enters (Dr. GRPO, arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.reduction import Reduction


@dataclass(frozen=True)
class Constant(Reduction):
    """1/(B · L) a token.

    Attributes
    ----------
    fixed_length : int or None
        L; None for the task's `max_completion_length`.
    """

    fixed_length: int | None

    kind = "constant"

    def check(self) -> None:
        """A length is a count."""
        super().check()
        legal = "a whole number of at least 1, or null"
        self.require(self.fixed_length is None or self.fixed_length >= 1, "fixed_length", legal)

    @property
    def length(self) -> int | None:
        """See `Reduction`."""
        return self.fixed_length
