"""Random numbers for every entry of a row, keyed by what they are for: counter based, on the tensor's own device.

Notation: N rows, V entries a row, k = key of a row, c = its counter, j = entry, M = the finaliser of SplitMix64, and
γ = ⌊2⁶⁴/φ⌋ its increment. Entry j of row n is a function of M(M(k ⊕ c + γ) + M(γ (j + 1))), so of (k, c, j) alone: it
depends neither on the other rows nor on how many there are. The mixing is exact integer arithmetic; after it only
float64 functions are used, so that devices can differ in the last bit of a float32 result, and rarely do.

`stalefront.keys` gives a generator a row, which suits one number a column; this gives one a word of the vocabulary.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """Number of int64 with the bits of an unsigned word."""
    return word - 2**64 if word >= 2**63 else word


# Constants of SplitMix64 (Steele, Lea, Flood 2014, variant 13 of Stafford's mixers).
GAMMA = _signed(0x9E3779B97F4A7C15)
FIRST, SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def row_keys(
    seed: int,
    purpose: str,
    batch: int,
    rows: int,
    first_row: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Keys of rows `first_row` … `first_row` + `rows` − 1 of stream (`seed`, `purpose`, `batch`): int64 (rows,).

    k ← M((k ⊕ w) + γ) over the words w = seed, CRC-32 of the purpose, batch, row; k starts at 0.
    """
    key = torch.zeros(rows, dtype=torch.int64, device=device)
    for word in (seed, zlib.crc32(purpose.encode()), batch):
        key = _absorbed(key, word)
    return _absorbed(key, torch.arange(first_row, first_row + rows, device=device))


def normals(key_N: Tensor, counter: int | Tensor, width: int) -> Tensor:
    """Φ⁻¹((b + ½) / 2⁵²) for 52 random bits b: standard normal, always finite, float32 (N, `width`).

    Parameters
    ----------
    key_N : int64 (N,)
        See `row_keys`.
    counter : int or int64 (N,)
        For example the position that is sampled.
    """
    bits = _shifted(_words(key_N, counter, width), 12)
    # With 53 bits the largest would round to 1, and Φ⁻¹(1) is infinite.
    normal_NV: Tensor = torch.special.ndtri((bits.double() + 0.5) * 2.0**-52)
    return normal_NV.float()


def uniforms(key_N: Tensor, counter: int | Tensor, width: int) -> Tensor:
    """b / 2⁵³ for 53 random bits b: uniform in [0, 1), float64 (N, `width`); parameters as in `normals`."""
    return _shifted(_words(key_N, counter, width), 11).double() * 2.0**-53


def _words(key_N: Tensor, counter: int | Tensor, width: int) -> Tensor:
    """64 random bits an entry: int64 (N, `width`)."""
    row_N = _absorbed(key_N, counter)
    # Columns are mixed on their own: consecutive states in a row would be those of another row, a few places on.
    column_V = _mixed(torch.arange(1, width + 1, device=key_N.device) * GAMMA)
    return _mixed(row_N[:, None] + column_V)


def _absorbed(key: Tensor, word: int | Tensor) -> Tensor:
    return _mixed((key ^ word) + GAMMA)


def _mixed(word: Tensor) -> Tensor:
    """Finaliser of SplitMix64: a bijection in which every bit depends on every other; products wrap at 2⁶⁴."""
    word = (word ^ _shifted(word, 30)) * FIRST
    word = (word ^ _shifted(word, 27)) * SECOND
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, by: int) -> Tensor:
    """Logical shift to the right: the arithmetic one of int64, without the copies of the sign."""
    return (word >> by) & ((1 << (64 - by)) - 1)
