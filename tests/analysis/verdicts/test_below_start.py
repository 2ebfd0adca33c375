"""below_start: final below initial, plainly or by a test."""

import pytest
from statsmodels.stats.proportion import proportions_ztest

from stalefront.analysis.verdicts import BelowStart
from stalefront.analysis.verdicts.below_start import two_proportion_p

CASES = {
    "rises": ([40, 50, 60, 70, 80, 90], "horizon", (False, None)),
    "ends where it began": ([40] * 6, "horizon", (False, None)),
    # Windows of three points: (60, 20, 20) is the first that stays below, and 20 its first low point.
    "falls below": ([40, 60, 60, 20, 20, 20, 20], "horizon", (True, (8, 12))),
    "below from the first step": ([40, 20, 20, 20], "horizon", (True, (0, 4))),
    "dips and returns": ([40, 10, 10, 10, 60, 60, 60], "horizon", (False, None)),
    "still running below": ([40, 60, 20, 20, 20, 20], "running", (None, None)),
    "non-finite": ([40] * 5, "non-finite", (True, (15, 16))),
    "too few samples": ([40, 10], "horizon", (None, None)),
}


@pytest.mark.parametrize("name", CASES)
def test_event_and_interval(curve, name):
    passes, end, (event, interval) = CASES[name]
    verdict = BelowStart()(curve(passes, end=end))
    assert verdict.event is event
    assert (verdict.step_lo, verdict.step_hi) == (interval or (None, None))


def test_a_test_asks_for_more_than_the_plain_comparison(curve):
    run = curve([40, 60, 60, 38, 38, 38])
    assert BelowStart()(run).event is True
    assert BelowStart(alpha=0.05)(run).event is False
    assert BelowStart(alpha=0.05)(curve([40, 60, 60, 10, 10, 10])).event is True


def test_p_value_is_the_pooled_two_proportion_test():
    expected = proportions_ztest([60, 40], [384, 128], alternative="smaller")[1]
    assert two_proportion_p(60, 384, 40, 128) == pytest.approx(expected, rel=1e-12)
    assert two_proportion_p(0, 384, 0, 128) == 0.5


@pytest.mark.parametrize("fields", [{"alpha": 0.6}, {"alpha": 0.0}, {"min_samples": 0}])
def test_senseless_thresholds_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        BelowStart(**fields)
