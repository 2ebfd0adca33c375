"""Keyed random numbers depend on their key alone."""

import numpy as np

from stalefront.keys import keyed, uniforms_BT


def test_rows_do_not_depend_on_the_batch_they_are_in():
    many = uniforms_BT(3, "rollout", 7, rows=64, length=6)
    few = uniforms_BT(3, "rollout", 7, rows=5, length=6)
    assert np.array_equal(many[:5], few)
    assert np.array_equal(many[:, :4], uniforms_BT(3, "rollout", 7, rows=64, length=4))
    assert np.array_equal(many[5:9], uniforms_BT(3, "rollout", 7, rows=4, length=6, first_row=5))


def test_every_part_of_the_key_counts():
    base = keyed(0, "a", 1, 2).random(4)
    for other in (keyed(1, "a", 1, 2), keyed(0, "b", 1, 2), keyed(0, "a", 2, 2), keyed(0, "a", 1, 3)):
        assert not np.any(base == other.random(4))


def test_streams_do_not_overlap():
    # A stream that ran into its neighbour's would repeat its numbers somewhere.
    long = keyed(0, "a", 1, 0).random(50_000)
    assert not np.isin(keyed(0, "a", 1, 1).random(100), long).any()


def test_values_are_uniform():
    values = uniforms_BT(0, "rollout", 1, rows=400, length=50).ravel()
    assert values.min() >= 0
    assert values.max() < 1
    # Standard error of the mean of 20,000 uniform numbers is .002.
    assert abs(values.mean() - 0.5) < 0.01
