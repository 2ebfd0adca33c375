"""Exact lag: ramps up to k and stays; delayed weights and delayed data are one experiment."""

import pytest


@pytest.mark.parametrize("via", ["weights", "data"])
def test_realised_lag_is_the_declared_one(make_cell, completed, via):
    rows = completed(make_cell(delay="lag", steps=8, **{"delay.lag_updates": 3, "delay.via": via}))[1:]
    assert [r["lag_max_updates"] for r in rows] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert [r["lag_mean_updates"] for r in rows] == [r["lag_max_updates"] for r in rows]
    assert all(r["at_refresh"] for r in rows)
    assert rows[-1]["theta_old_ratio_max"] != 1.0


def test_delayed_weights_and_delayed_data_give_the_same_records(make_cell, completed, numbers):
    options = {"delay": "lag", "steps": 12, "delay.lag_updates": 5, "optimizer.warmup_steps": 0}
    weights = completed(make_cell(**options, **{"delay.via": "weights"}))
    data = completed(make_cell(**options, **{"delay.via": "data"}))
    # What differs by meaning: an older copy is behind while it generates, a queued batch while it waits.
    assert [r["lag_gen_mean_updates"] for r in weights[1:]] == [r["lag_mean_updates"] for r in weights[1:]]
    assert [r["lag_wait_mean_updates"] for r in data[1:]] == [r["lag_mean_updates"] for r in data[1:]]
    for row in weights + data:
        row["lag_gen_mean_updates"] = row["lag_wait_mean_updates"] = None
    assert numbers(weights) == numbers(data)


@pytest.mark.parametrize("via", ["weights", "data"])
def test_lag_zero_is_on_policy_bit_for_bit(make_cell, completed, numbers, via):
    lag = make_cell(delay="lag", **{"delay.lag_updates": 0, "delay.via": via})
    assert numbers(completed(lag)) == numbers(completed(make_cell(delay="none")))


def test_a_lag_longer_than_the_run_samples_from_the_start_only(make_cell, completed):
    rows = completed(make_cell(delay="lag", steps=4, **{"delay.lag_updates": 63}))[1:]
    assert [r["lag_max_updates"] for r in rows] == [0, 1, 2, 3]
