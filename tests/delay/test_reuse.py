"""Reuse: lags run 0 … S − 1, a batch serves S steps, parts are used in turn."""

import pytest


def test_lags_and_batches(make_cell, completed):
    rows = completed(make_cell(steps=10, **{"delay.S": 4}))[1:]
    assert [r["lag_max_updates"] for r in rows] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [r["lag_mean_updates"] for r in rows] == [r["lag_max_updates"] for r in rows]
    assert [r["batch"] for r in rows] == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert [r["step_in_batch"] for r in rows] == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert [r["at_refresh"] for r in rows] == [r["step_in_batch"] == 1 for r in rows]
    assert len({r["reward_train"] for r in rows if r["batch"] == 1}) == 1
    assert rows[0]["theta_old_ratio_max"] == 1.0
    assert rows[3]["theta_old_ratio_max"] != 1.0


@pytest.mark.parametrize(("parts", "share"), [(1, 1), (2, 2), (4, 4)])
def test_parts_of_a_batch(make_cell, completed, parts, share):
    rows = completed(make_cell(steps=8, **{"delay.S": 4, "delay.minibatches": parts}))[1:]
    full = completed(make_cell(steps=1))[1]["tokens"]
    first_pass = sum(r["tokens"] for r in rows[:parts])
    assert first_pass == full
    assert rows[0]["tokens"] < full or share == 1
    assert rows[0]["theta_old_ratio_max"] == 1.0
