"""Values as a narrower number format holds them: pure functions, which return them in the type they came in.

Notation: x = a weight or an activation, s = the scale that a group of values shares, q = the largest value of the
format, V = the values of the format, RN = round to nearest, ties to even. A weight has shape (out, in), the weights of
E experts (E, out, in), and an activation (…, features).

Scaled formats are computed in float32. A group with a value that is not finite is NaN, as its scale is: nothing
saturates and nothing is replaced. A sampler has no gradient, and these functions are not meant to have one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scale = Literal["tensor", "channel"]

# Largest finite value of E4M3 without infinities, S.1111.110 (arXiv 2209.05433, table 1).
E4M3_MAX = 448.0


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """RN(x) in `dtype`; what exceeds its range is infinite."""
    return x.to(dtype).to(x.dtype)


def fp8_e4m3(x: Tensor, scale: Scale) -> Tensor:
    """s RN(x / s) over V = E4M3 (arXiv 2209.05433), s = max |x| / 448.

    Parameters
    ----------
    scale : {"tensor", "channel"}
        What shares an s: a matrix (the last two dimensions; everything where there are fewer) or a row of the last
        dimension. That row is an output channel of a weight, one of an expert, and a token of an activation.
    """
    value, step = _scaled(x.float(), scale, E4M3_MAX)
    return (value.to(torch.float8_e4m3fn).float() * step).to(x.dtype)


def integer(x: Tensor, bits: int, *, scale: Scale, group_size: int | None = None) -> Tensor:
    """s RN(x / s) over the integers −q … q, q = 2^(bits − 1) − 1 and s = max |x| / q: symmetric, without a zero point.

    Parameters
    ----------
    scale : {"tensor", "channel"}
        What shares an s: see `fp8_e4m3`.
    group_size : int or None
        With one scale a channel, so many neighbours in the last dimension share an s; None for the whole row.
    """
    if bits < 2:
        raise ValueError(f"bits={bits}: must be at least 2, for a symmetric range has a sign and a value")
    values = x.float() if group_size is None else _grouped(x.float(), scale, group_size)
    value, step = _scaled(values, scale, 2.0 ** (bits - 1) - 1)
    return (value.round() * step).view_as(x).to(x.dtype)


def blended(x: Tensor, rounded: Tensor, strength: float) -> Tensor:
    """x + strength (rounded − x); strength 0 is x itself and 1 is `rounded` itself, bit for bit."""
    if strength == 0:
        return x
    if strength == 1:
        return rounded
    return x + strength * (rounded - x)


def _grouped(x: Tensor, scale: Scale, group_size: int) -> Tensor:
    """(…, in) as (…, in / group_size, group_size)."""
    if scale != "channel":
        raise ValueError(f"group_size={group_size} with scale={scale!r}: groups are parts of a channel; use 'channel'")
    width = x.shape[-1]
    if group_size < 1 or width % group_size:
        raise ValueError(f"group_size={group_size}: must divide the last dimension, which has {width} entries")
    return x.reshape(*x.shape[:-1], width // group_size, group_size)


def _scaled(x: Tensor, scale: Scale, top: float) -> tuple[Tensor, Tensor]:
    """x / s inside −`top` … `top`, and s, which broadcasts over x."""
    if not x.numel():
        # An expert that no token reached: there is no largest value.
        return x, x.new_ones(())
    across = -1 if scale == "channel" else tuple(range(x.dim()))[-2:]
    step = x.abs().amax(across, keepdim=True) / top
    # A group of zeros has s = 0, and so has one too small for float32 to divide: both become 0, not 0/0.
    step = torch.where(step == 0, torch.ones_like(step), step)
    # The largest value may come out an ulp above the top; some casts make NaN of that and others saturate.
    return (x / step).clamp(-top, top), step
