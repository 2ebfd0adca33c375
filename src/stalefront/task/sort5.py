"""Sort five digits: a 0/1 task small enough that a grid of runs fits on two CPU cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stalefront.keys import keyed
from stalefront.task import RewardFunction, Row, Task

DIGITS = 5
# One input in ten is held out; the multiplier (Knuth's 2654435761) scatters neighbours.
HELD_OUT_SHARE = 10


def is_held_out(number: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of the 100,000 inputs belong to validation."""
    scattered: NDArray[np.int64] = (number * 2654435761 % 2**32) // 65536
    return np.equal(scattered % HELD_OUT_SHARE, 0)


@dataclass(frozen=True)
class Sort5(Task):
    """Prompt `_52413>`, answer `12345`: reward 1 for the sorted digits and nothing else, 0 otherwise."""

    def train_rows(self, seed: int, batch: int) -> list[Row]:
        """Uniform over the inputs that are not held out."""
        return _draw(seed, "sort5 train", batch, self.num_prompts, held_out=False)

    def validation_rows(self, seed: int, count: int) -> list[Row]:
        """Uniform over the held-out inputs."""
        return _draw(seed, "sort5 validation", 0, count, held_out=True)

    @property
    def reward(self) -> RewardFunction:
        """1 for an exact answer."""
        return exact


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    """1 where the completion is the answer, character by character; 0 elsewhere."""
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def _draw(seed: int, purpose: str, batch: int, count: int, *, held_out: bool) -> list[Row]:
    """`count` rows by rejection from one keyed stream."""
    # At a held-out share of 1/10, 40 draws a row leave less than one chance in 1e10 of running short at 128 rows.
    numbers = keyed(seed, purpose, batch).integers(0, 10**DIGITS, size=64 + 40 * count)
    chosen = numbers[is_held_out(numbers) == held_out][:count]
    assert len(chosen) == count, "the stream is long enough for every count"
    texts = [f"{number:0{DIGITS}d}" for number in chosen]
    return [{"prompt": f"_{text}>", "answer": "".join(sorted(text))} for text in texts]
