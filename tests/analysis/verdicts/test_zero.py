"""first_zero and remains_zero: tables of curves and the intervals in which the event must lie."""

import numpy as np
import pytest
from scipy import stats

from stalefront.analysis.verdicts import FirstZero, RemainsZero, kind_of
from stalefront.analysis.verdicts.base import clopper_pearson_lower, clopper_pearson_upper

UP, Z = 40, 0  # passes of 128 in a point that is alive, and in one at zero

# name: (passes per point, end, first_zero → event and interval, remains_zero → event and interval)
CASES = {
    "alive throughout": ([UP] * 8, "horizon", (False, None), (False, None)),
    "falls and stays": ([UP] * 3 + [Z] * 5, "horizon", (True, (8, 12)), (True, (8, 12))),
    "falls at the first step": ([UP] + [Z] * 5, "horizon", (True, (0, 4)), (True, (0, 4))),
    "recovers": ([UP] * 2 + [Z] * 3 + [UP] * 3, "horizon", (True, (4, 8)), (False, None)),
    "recovers, then stays at zero": (
        [UP] * 2 + [Z] * 3 + [UP] * 2 + [Z] * 4,
        "horizon",
        (True, (4, 8)),
        (True, (24, 28)),
    ),
    "two zero points are too few samples": ([UP] * 3 + [Z] * 2 + [UP] * 3, "horizon", (False, None), (False, None)),
    "two zero points at the end straddle no full window": ([UP] * 4 + [Z] * 2, "horizon", (False, None), (False, None)),
    "three at the end do": ([UP] * 4 + [Z] * 3, "horizon", (True, (12, 16)), (True, (12, 16))),
    "flicker above one per cent is not zero": ([UP] * 3 + [2] * 6, "horizon", (False, None), (False, None)),
    "one pass in 384 is not shown to be below one per cent": ([UP, UP, 1, 0, 0], "horizon", (False,), (False,)),
    "one late pass neither moves nor undoes the end": (
        [UP] * 3 + [Z] * 5 + [1],
        "horizon",
        (True, (8, 12)),
        (True, (8, 12)),
    ),
    "one pass in thousands of samples": (
        [UP] * 3 + [Z] * 33 + [1, 0, 0, 0],
        "horizon",
        (True, (8, 12)),
        (True, (8, 12)),
    ),
    "a few passes at the end are neither zero nor a recovery": (
        [UP] * 3 + [Z] * 3 + [2, 2, 3],
        "horizon",
        (True, (8, 12)),
        (None,),
    ),
    # lower bound of 8 passes in 384: .0104
    "eight passes in the last window are a recovery": (
        [UP] * 3 + [Z] * 3 + [2, 3, 3],
        "horizon",
        (True, (8, 12)),
        (False, None),
    ),
    "a visit above zero in between counts, a stray pass does not": (
        [UP] * 2 + [Z] * 4 + [UP] + [Z] * 3 + [1] + [Z] * 4,
        "horizon",
        (True, (4, 8)),
        (True, (24, 28)),
    ),
    "never above zero": ([Z] * 8, "horizon", (None,), (None,)),
    "starts at zero, rises, falls": ([Z] * 4 + [UP] * 3 + [Z] * 4, "horizon", (True, (24, 28)), (True, (24, 28))),
    "too few samples in all": ([UP, Z], "horizon", (None,), (None,)),
    "running and alive": ([UP] * 5, "running", (False, None), (False, None)),
    "failed while at zero may have recovered": ([UP] * 3 + [Z] * 5, "failed", (True, (8, 12)), (None,)),
    "stopped on request while at zero": ([UP] * 3 + [Z] * 5, "stopped", (True, (8, 12)), (True, (8, 12))),
    "non-finite while alive": ([UP] * 5, "non-finite", (True, (15, 16)), (True, (15, 16))),
    "non-finite after zero": ([UP] * 3 + [Z] * 5, "non-finite", (True, (8, 12)), (True, (8, 12))),
    "non-finite after recovery": ([UP] + [Z] * 4 + [UP] * 3, "non-finite", (True, (0, 4)), (True, (27, 28))),
    "non-finite with too few samples": ([UP], "non-finite", (True, (-1, 0)), (True, (-1, 0))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("definition", [FirstZero(), RemainsZero()], ids=lambda d: d.name)
def test_event_and_interval(curve, name, definition):
    passes, end, *expected = CASES[name]
    want = expected[0 if definition.name == "first_zero" else 1]
    verdict = definition(curve(passes, end=end))
    assert verdict.event is want[0]
    interval = want[1] if len(want) > 1 else None
    assert (verdict.step_lo, verdict.step_hi) == (interval or (None, None))
    assert verdict.threshold == {"max_rate": 0.01, "level": 0.95, "min_samples": 300}


def test_lower_bound_mirrors_the_upper_one():
    assert clopper_pearson_lower(np.array([0]), np.array([384]), 0.95)[0] == 0.0
    # The l that solves P(X >= 8 | 384, l) = .05.
    lower = clopper_pearson_lower(np.array([8]), np.array([384]), 0.95)[0]
    assert stats.binom.sf(7, 384, lower) == pytest.approx(0.05)
    assert lower > 0.01 > clopper_pearson_lower(np.array([7]), np.array([384]), 0.95)[0]


def test_undecidable_says_why(curve):
    assert "7 passes in the last 384" in RemainsZero()(curve([UP] * 3 + [Z] * 3 + [2, 2, 3])).evidence["reason"]
    assert "n=256" in FirstZero()(curve([UP, Z])).evidence["reason"]
    assert "from the first window on" in RemainsZero()(curve([Z] * 9)).evidence["reason"]
    assert "step 28" in RemainsZero()(curve([UP] * 3 + [Z] * 5, end="running")).evidence["reason"]


def test_non_finite_keeps_its_cause(curve):
    assert FirstZero()(curve([UP] * 5, end="non-finite")).evidence["cause"] == "non-finite parameters"


def test_visits_to_zero_are_counted(curve):
    evidence = FirstZero()(curve([UP] * 2 + [Z] * 3 + [UP] * 2 + [Z] * 5 + [UP] * 2)).evidence
    assert evidence["n_dips"] == 2
    assert evidence["dwell_steps"] == 16
    assert evidence["t_last_zero"] == 44
    assert evidence["recovered"] is True


def test_window_size_follows_the_samples(curve):
    """With 1000 samples a point, one point is a window; with 10 it takes thirty."""
    assert FirstZero()(curve([400, 400, 0, 400], n=1000)).step_hi == 8
    assert FirstZero()(curve([4] * 5 + [0] * 29, n=10)).event is False
    assert FirstZero()(curve([4] * 5 + [0] * 30, n=10)).step_hi == 20


def test_clopper_pearson_solves_its_equation():
    passes, samples = np.array([0, 1, 5, 40]), np.array([300, 384, 1000, 128])
    upper = clopper_pearson_upper(passes, samples, 0.95)
    np.testing.assert_allclose(stats.binom.cdf(passes, samples, upper), 0.05, rtol=1e-9)
    # By hand: (1 − u)³⁰⁰ = .05.
    assert upper[0] == pytest.approx(1 - 0.05 ** (1 / 300), rel=1e-12)
    assert clopper_pearson_upper(np.array([7]), np.array([7]), 0.95)[0] == 1.0


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"max_rate": 0.0}, "max_rate=0.0"),
        ({"max_rate": 1.5}, "max_rate=1.5"),
        ({"level": 0.4}, "level=0.4"),
        ({"min_samples": 0}, "min_samples=0"),
        ({"min_samples": 200}, "299 samples"),
    ],
)
@pytest.mark.parametrize("kind", [FirstZero, RemainsZero])
def test_senseless_thresholds_are_refused(kind, fields, hint):
    with pytest.raises(ValueError, match=hint):
        kind(**fields)


@pytest.mark.parametrize(
    ("passes", "end", "kind"),
    [
        ([UP] * 8, "horizon", "stable"),
        ([UP] * 8, "stopped", "undecided"),
        ([UP] * 8, "failed", "undecided"),
        ([UP] * 3 + [Z] * 5, "horizon", "collapsed for good"),
        ([UP] * 3 + [Z] * 5, "running", "undecided"),
        ([UP] * 8, "non-finite", "collapsed for good"),
        ([UP] * 2 + [Z] * 3 + [UP] * 3, "horizon", "touched zero and recovered"),
        ([UP], "horizon", "undecided"),
    ],
)
def test_kinds(curve, passes, end, kind):
    run = curve(passes, end=end)
    assert kind_of(run, FirstZero()(run), RemainsZero()(run)) == kind
