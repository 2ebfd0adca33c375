"""half_peak: below a share of the running maximum for several windows in a row."""

import pytest

from stalefront.analysis.verdicts import HalfPeak

CASES = {
    "rises": ([40, 50, 60, 70, 80, 90, 90, 90], "horizon", (False, None)),
    "falls to a third and stays": ([90] * 4 + [30] * 6, "horizon", (True, (12, 16))),
    "falls to zero": ([90] * 4 + [0] * 6, "horizon", (True, (12, 16))),
    # Windows hold three points: a dip of one point makes no window low, a dip of three makes three.
    "dips too shortly": ([90] * 4 + [10] + [90] * 4, "horizon", (False, None)),
    "dips long enough": ([90] * 4 + [10] * 5 + [90] * 4, "horizon", (True, (12, 16))),
    "falls to two thirds": ([90] * 4 + [60] * 6, "horizon", (False, None)),
    "never above zero": ([0] * 8, "horizon", (None, None)),
    "too few samples": ([90, 0], "horizon", (None, None)),
    "non-finite": ([90] * 5, "non-finite", (True, (15, 16))),
    "failed after the fall": ([90] * 4 + [0] * 6, "failed", (True, (12, 16))),
}


@pytest.mark.parametrize("name", CASES)
def test_event_and_interval(curve, name):
    passes, end, (event, interval) = CASES[name]
    verdict = HalfPeak()(curve(passes, end=end))
    assert verdict.event is event
    assert (verdict.step_lo, verdict.step_hi) == (interval or (None, None))


def test_nan_reward_is_a_fall_not_a_gap(curve):
    run = curve([90] * 4 + [0] * 6, reward=[0.7] * 4 + [float("nan")] * 6)
    assert HalfPeak()(run).event is True


@pytest.mark.parametrize("fields", [{"fraction": 1.0}, {"n_windows": 0}, {"min_samples": 0}])
def test_senseless_thresholds_are_refused(fields):
    name = next(iter(fields))
    with pytest.raises(ValueError, match=name):
        HalfPeak(**fields)
