"""Rounding by hand, its identities, and every format against an independent one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stalefront.rounding import blended, cast, fp8_e4m3, integer

SCALES = ("tensor", "channel")


def sampled(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def e4m3_values():
    """Every finite value that a sign, four bits of exponent and three of mantissa can mean, ascending; and mantissas.

    Exponent 0 is subnormal: m/8 2^-6; else (1 + m/8) 2^(e - 7). The last pattern, e = 15 and m = 7, is NaN.
    """
    found = {}
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) != (15, 7):
                leading = min(exponent, 1)
                value = (leading + mantissa / 8) * 2.0 ** (max(exponent, 1) - 7)
                found |= {value: mantissa, -value: mantissa}
    return np.array(sorted(found)), np.array([found[value] for value in sorted(found)])


def nearest_e4m3(x):
    """Brute force: the value at the smallest distance, of two equally near the one with an even mantissa."""
    values, mantissa = e4m3_values()
    distance = np.abs(x.astype(np.float64)[..., None] - values)
    near = distance == distance.min(-1, keepdims=True)
    return values[np.argmax(near * (2 - mantissa % 2), -1)]


# Casts


def test_cast_by_hand():
    # bfloat16 has 7 bits of mantissa: the neighbours of 1 are 2^-7 above it. float16 has 10, and ends at 65,504.
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7, -(1 + 2**-9)])
    assert cast(x, torch.bfloat16).tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0]
    assert cast(torch.tensor([1 + 2**-11, 65504.0, 65520.0]), torch.float16).tolist() == [1.0, 65504.0, math.inf]
    assert cast(x, torch.bfloat16).dtype == torch.float32


def test_cast_to_bfloat16_against_bit_arithmetic():
    x = sampled(4096)
    bits = x.numpy().view(np.uint32).astype(np.uint64)
    even = (bits >> np.uint64(16)) & np.uint64(1)
    upper = ((bits + np.uint64(0x7FFF) + even) >> np.uint64(16)) << np.uint64(16)
    assert np.array_equal(cast(x, torch.bfloat16).numpy(), upper.astype(np.uint32).view(np.float32))


def test_cast_to_float16_against_numpy():
    x = sampled(4096) * 1e-3
    assert np.array_equal(cast(x, torch.float16).numpy(), x.numpy().astype(np.float16).astype(np.float32))


# Eight bits of floating point


def test_fp8_by_hand():
    # The largest is 448, so that s = 1: between 16 and 32 the step is 2, and 17 and 19 are ties.
    x = torch.tensor([[448.0, 17.0, 19.0, 18.9, -300.0, 2**-10, 2**-9]])
    assert fp8_e4m3(x, "channel").tolist() == [[448.0, 16.0, 20.0, 18.0, -288.0, 0.0, 2**-9]]
    # s = 1/2 moves every threshold.
    assert fp8_e4m3(x / 2, "channel").tolist() == [[224.0, 8.0, 10.0, 9.0, -144.0, 0.0, 2**-10]]


@pytest.mark.parametrize("scale", SCALES)
def test_fp8_against_all_values_of_the_format(scale):
    x = sampled(24, 64) * torch.logspace(-6, 3, 24)[:, None]
    array = x.numpy()
    top = np.abs(array).max(-1, keepdims=True) if scale == "channel" else np.abs(array).max(keepdims=True)
    step = top / np.float32(448)
    expected = nearest_e4m3(array / step).astype(np.float32) * step
    assert np.array_equal(fp8_e4m3(x, scale).numpy(), expected)


def test_fp8_leaves_its_own_values():
    values, _ = e4m3_values()
    x = torch.tensor(values, dtype=torch.float32)[None]
    assert torch.equal(fp8_e4m3(x, "channel"), x)


# Integers


def test_integer_by_hand():
    # Four bits: −7 … 7; ties go to the even neighbour, and −7.4 ends the range with the scale that it sets.
    x = torch.tensor([[7.0, 0.5, 1.5, -2.5, 3.4, -6.6]])
    assert integer(x, 4, scale="channel").tolist() == [[7.0, 0.0, 2.0, -2.0, 3.0, -7.0]]
    assert integer(torch.tensor([[3.0, -7.4]]), 2, scale="channel")[0].tolist() == pytest.approx([0.0, -7.4])
    assert integer(torch.tensor([[4.0, -7.4]]), 2, scale="channel")[0].tolist() == pytest.approx([7.4, -7.4])


def test_groups_by_hand():
    x = torch.tensor([[7.0, 0.4, 14.0, 1.2]])
    assert integer(x, 4, scale="channel", group_size=2).tolist() == [[7.0, 0.0, 14.0, 2.0]]
    assert integer(x, 4, scale="channel").tolist() == [[8.0, 0.0, 14.0, 2.0]]


def test_int8_against_torch():
    x = sampled(16, 512)
    scales = x.abs().amax(-1) / 127
    zero = torch.zeros(16, dtype=torch.int32)
    per_channel = torch.fake_quantize_per_channel_affine(x, scales, zero, 0, -127, 127)
    torch.testing.assert_close(integer(x, 8, scale="channel"), per_channel, rtol=1e-6, atol=0)
    per_tensor = torch.fake_quantize_per_tensor_affine(x, float(scales.max()), 0, -127, 127)
    torch.testing.assert_close(integer(x, 8, scale="tensor"), per_tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("group_size", [None, 32, 128])
def test_int4_against_numpy(group_size):
    x = sampled(8, 128, seed=1)
    groups = x.numpy().reshape(8, -1, group_size or 128)
    step = np.abs(groups).max(-1, keepdims=True) / np.float32(7)
    expected = (np.rint(groups / step) * step).reshape(8, 128)
    assert np.array_equal(integer(x, 4, scale="channel", group_size=group_size).numpy(), expected)


def test_more_bits_are_nearer():
    x = sampled(32, 64)
    error = [float((integer(x, bits, scale="channel") - x).abs().max()) for bits in (3, 4, 6, 8, 12)]
    assert error == sorted(error, reverse=True)
    # Half a step of the largest scale.
    assert error[3] <= float(x.abs().max()) / 127 / 2 * (1 + 1e-6)


def test_a_range_without_values_and_groups_that_do_not_fit_are_refused():
    x = sampled(4, 6)
    with pytest.raises(ValueError, match=r"bits=1: must be at least 2"):
        integer(x, 1, scale="channel")
    for group_size in (4, 0, -2):
        with pytest.raises(ValueError, match=rf"group_size={group_size}: must divide the last dimension, which has 6"):
            integer(x, 4, scale="channel", group_size=group_size)
    with pytest.raises(ValueError, match=r"group_size=2 with scale='tensor'.*use 'channel'"):
        integer(x, 4, scale="tensor", group_size=2)


def test_the_range_ends_where_it_should_when_the_scale_is_rounded():
    # In units of the smallest float32, 1070/127 is rounded to 8, and 1070/8 lies outside of -127 … 127.
    unit = 2.0**-149
    assert integer(torch.tensor([[1070 * unit, -1070 * unit]]), 8, scale="channel").tolist() == [
        [1016 * unit, -1016 * unit]
    ]
    # So is 3763/448, and 3763/8 lies outside of -448 … 448.
    assert fp8_e4m3(torch.tensor([[3763 * unit]]), "channel").tolist() == [[3584 * unit]]


# What all scaled formats share

FORMATS = {
    "fp8": fp8_e4m3,
    "int8": lambda x, scale: integer(x, 8, scale=scale),
    "int4": lambda x, scale: integer(x, 4, scale=scale),
}
each_format = pytest.mark.parametrize("rounded", FORMATS.values(), ids=FORMATS)


@each_format
def test_experts_are_rounded_one_by_one(rounded):
    x = sampled(3, 4, 32) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    for scale in SCALES:
        assert torch.equal(rounded(x, scale), torch.stack([rounded(expert, scale) for expert in x]))
    rows = torch.stack([torch.stack([rounded(row, "tensor") for row in expert]) for expert in x])
    assert torch.equal(rounded(x, "channel"), rows)
    assert not torch.equal(rounded(x, "tensor"), rows)


@each_format
@pytest.mark.parametrize("scale", SCALES)
def test_twice_is_once(rounded, scale):
    once = rounded(sampled(16, 64), scale)
    torch.testing.assert_close(rounded(once, scale), once, rtol=3e-7, atol=0)


@each_format
@pytest.mark.parametrize("scale", SCALES)
def test_powers_of_two_and_signs_come_out(rounded, scale):
    x = sampled(16, 64)
    assert torch.equal(rounded(-8 * x, scale), -8 * rounded(x, scale))


@each_format
@pytest.mark.parametrize("scale", SCALES)
def test_zeros_stay_zeros(rounded, scale):
    x = sampled(4, 8)
    x[1] = 0
    assert torch.equal(rounded(x, scale)[1], x[1])
    assert torch.equal(rounded(torch.zeros(4, 8), scale), torch.zeros(4, 8))


@each_format
@pytest.mark.parametrize("scale", SCALES)
def test_a_scale_too_small_for_float32_makes_no_nan(rounded, scale):
    assert rounded(torch.full((2, 4), 1e-45), scale).isfinite().all()


@each_format
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(rounded, value):
    x = sampled(2, 3, 8)
    x[1, 2, 3] = value
    by_row, by_matrix = rounded(x, "channel"), rounded(x, "tensor")
    assert by_row[1, 2].isnan().all()
    assert by_row.isnan().sum() == 8
    assert by_matrix[1].isnan().all()
    assert by_matrix.isnan().sum() == 24


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_type_is_kept(rounded, dtype):
    x = sampled(4, 32).to(dtype)
    got = rounded(x, "channel")
    assert got.dtype == dtype
    assert torch.equal(got, rounded(x.float(), "channel").to(dtype))


@each_format
@pytest.mark.parametrize("shape", [(), (5,), (0, 8), (2, 0, 8), (2, 3, 4, 8)])
def test_any_shape(rounded, shape):
    x = sampled(*shape)
    for scale in SCALES:
        assert rounded(x, scale).shape == shape
    # Below two dimensions everything shares one scale, and in the last one a row does.
    if len(shape) < 2:
        assert torch.equal(rounded(x, "tensor"), rounded(x, "channel"))


# Blends


def test_blends_by_hand():
    x, rounded = torch.tensor([1.0, -2.0]), torch.tensor([2.0, -4.0])
    assert blended(x, rounded, 0.25).tolist() == [1.25, -2.5]


def test_no_strength_is_the_value_and_all_of_it_the_rounded_one():
    x = sampled(64) * 1e6
    x[0] = math.nan
    rounded = integer(x, 4, scale="channel")
    assert blended(x, rounded, 0) is x
    assert blended(x, rounded, 1) is rounded


def test_the_error_grows_with_the_strength():
    x = sampled(256, dtype=torch.float64)
    rounded = cast(x, torch.bfloat16)
    for strength in (0.1, 0.5, 0.9):
        torch.testing.assert_close(blended(x, rounded, strength) - x, strength * (rounded - x), rtol=1e-9, atol=1e-15)
