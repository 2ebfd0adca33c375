"""A reward function that fails, to see what launchers make of an exception in a cell."""

from __future__ import annotations

from typing import Any


def raises(**_: Any) -> list[float]:
    raise ValueError("this cell was made to fail")
