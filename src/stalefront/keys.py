"""Random numbers keyed by what they are for, so that they depend neither on order nor on how work is batched."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray


def keyed(seed: int, purpose: str, *counter: int) -> Generator:
    """Generator of stream (`seed`, `purpose`, `counter`): Philox keyed by the first two, counted by the others.

    Parameters
    ----------
    counter : up to three ints of at least 0
        For example rollout batch and row.
    """
    key = np.array([seed, zlib.crc32(purpose.encode())], dtype=np.uint64)
    # The lowest word counts blocks inside a stream and starts at 0.
    words = np.array([0, *counter, *([0] * (3 - len(counter)))], dtype=np.uint64)
    return Generator(Philox(key=key, counter=words))


def uniforms_BT(seed: int, purpose: str, batch: int, rows: int, length: int, first_row: int = 0) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), a row of `length` for every sampled sequence, from `first_row` on.

    A row is the same in any batch size and however a batch is cut into pieces.
    """
    return np.stack([keyed(seed, purpose, batch, first_row + row).random(length) for row in range(rows)])
