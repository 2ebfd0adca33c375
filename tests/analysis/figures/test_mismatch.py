"""Figures of mismatch and replay: their data, the same bytes twice, and what they do where there is little to draw."""

import math

import numpy as np
import pandas as pd
import pytest

from stalefront.analysis.figures import mismatch, routing, style
from stalefront.analysis.fits.interaction import fit_interaction
from stalefront.analysis.fits.levels import Level
from stalefront.analysis.fits.replay_bias import COLUMNS, fit_replay_bias

LEVELS = (Level("none", 0.0), Level("0.01", 0.01), Level("0.1", 0.1))


@pytest.fixture
def fits(outcome_frame):
    """Steps at 2e-3·10^−loss, the last level beyond the grid at S = 16."""

    def make(losses=(0.0, 0.25, 0.5), levels=LEVELS, definitions=("first_zero", "remains_zero")):
        rates = [5e-4 * 2.0**i for i in range(5)]
        frames = [
            (
                v,
                outcome_frame(
                    (s, e, i, e * s**0.25 > 2.83e-3 * 10**-x) for s in (1, 4, 16) for e in rates for i in (0, 1)
                ),
            )
            for v, x in zip(levels, losses, strict=True)
        ]
        return [fit_interaction(frames, axis="target_kl", definition=d, arm="all") for d in definitions]

    return make


@pytest.fixture
def facets():
    """Two settings with none, r2 and r3 over four lags and two seeds."""
    rows = []
    for kind, seed, lag in ((k, s, i) for k in ("none", "r2", "r3") for s in (0, 1) for i in range(4)):
        row = {"cell_id": f"{kind}{seed}", "replay": kind, "S": 4, "lr": 1e-3, "seed": seed, "lag": lag}
        row |= {f"{n}_{what}": 0 for n in COLUMNS.values() for what in ("sum", "n")}
        row |= {"old_mu_sum": 2e-3, "old_mu_n": 2, "theta_mu_sum": 6e-3, "theta_mu_n": 3}
        if kind != "none":
            row |= {"gap_sum": (1 + seed) * 1e-3 * lag, "gap_n": 2, "drift_sum": 0.1 * lag, "drift_n": 1}
        rows.append(row)
    frame = pd.DataFrame(rows)
    return [("S=4", frame), ("S=16", frame)]


def routing_fits(facets):
    return [fit_replay_bias(part, replay=r, arm=label) for label, part in facets for r in ("r2", "r3")]


def test_every_level_and_S_is_a_point_and_its_loss_another(fits):
    frame = mismatch.data(fits())
    counts = frame[frame["definition"] == "first_zero"]["layer"].value_counts()
    assert (counts["eta50"], counts["loss"], counts["additive"], counts["model"]) == (9, 6, 2, 27)
    found = frame[(frame["layer"] == "eta50") & (frame["S"] == 1) & (frame["level"] == "none")].iloc[0]
    assert found["lo"] < found["value"] < found["hi"]


def test_losses_are_differences_of_the_points(fits):
    frame = mismatch.data(fits((0.0, 0.25, 0.4)))
    points = frame[frame["definition"] == "first_zero"].set_index(["layer", "level", "S"])["value"]
    for s in (1, 4):
        expected = math.log10(points["eta50", "none", s] / points["eta50", "0.01", s])
        assert points["loss", "0.01", s] == pytest.approx(expected)


def test_what_lies_beyond_the_grid_is_a_bound(fits):
    frame = mismatch.data(fits((0.0, 0.25, 1.2)))
    last = frame[(frame["level"] == "0.1") & (frame["definition"] == "first_zero") & (frame["S"] == 16)]
    sides = last.dropna(subset=["censoring"]).set_index("layer")["censoring"]
    assert (sides["eta50"], sides["loss"]) == ("left", "right")
    assert last[last["layer"] == "loss"]["hi"].iloc[0] is None


def test_levels_stand_by_the_logarithm_of_their_size(fits):
    sized, named = mismatch.data(fits()), mismatch.data(fits(levels=[Level(n) for n in ("none", "r2", "r3")]))
    assert sized.drop_duplicates("level").set_index("level")["place"].to_dict() == {"none": 0, "0.01": 1, "0.1": 2}
    assert named.drop_duplicates("level").set_index("level")["place"].to_dict() == {"none": 0, "r2": 1, "r3": 2}
    assert (sized.attrs["sized"], named.attrs["sized"]) == (True, False)


@pytest.mark.parametrize("losses", [(0.0, 0.25, 0.4), (0.0, 0.25, 1.2), (-5.0, -5.0, -5.0), (5.0, 0.0, 5.0)])
def test_mismatch_draws_the_same_bytes_twice(fits, losses):
    frame = mismatch.data(fits(losses))
    first = style.png(mismatch.draw(frame))
    assert first.startswith(b"\x89PNG")
    assert first == style.png(mismatch.draw(frame))


def test_a_line_a_replay_with_means_and_ranges(facets):
    frame = routing.data(facets, routing_fits(facets))
    gap = frame[(frame["layer"] == "gap") & (frame["setting"] == "S=4") & (frame["replay"] == "r2")]
    assert gap["mean"].tolist() == pytest.approx([0, 7.5e-4, 1.5e-3, 2.25e-3])
    assert (gap["lo"].iloc[2], gap["hi"].iloc[2]) == pytest.approx((1e-3, 2e-3))
    assert set(frame[frame["layer"] == "theta_mu"]["replay"]) == {"none", "r2", "r3"}
    assert frame[frame["layer"] == "removed"]["mean"].tolist() == pytest.approx([1e-3] * 4)
    starts = frame[frame["layer"] == "start"]
    # Alone the seeds begin at lags 3 and 2, their mean at 2.
    assert set(starts["lag"]) == {2}
    assert set(zip(starts["lo"], starts["hi"], strict=True)) == {(2, 3)}


def test_many_settings_are_thinned_and_said(facets):
    many = [(f"S={i}", part) for i in range(20) for part in [facets[0][1]]]
    frame = routing.data(many, [])
    assert frame["setting"].nunique() == routing.MAX_SETTINGS
    assert frame.attrs["note"] == "To stay readable, 8 of 20 settings are drawn."


@pytest.mark.parametrize("spoil", [None, math.inf, math.nan, 0.0])
def test_routing_draws_the_same_bytes_twice(facets, spoil):
    if spoil is not None:
        facets = [
            (label, part.assign(gap_sum=np.where(part["lag"] > 1, spoil, part["gap_sum"]))) for label, part in facets
        ]
    frame = routing.data(facets, routing_fits(facets))
    first = style.png(routing.draw(frame))
    assert first.startswith(b"\x89PNG")
    assert first == style.png(routing.draw(frame))


def test_nothing_measured_is_said(facets):
    nothing = [(label, part.assign(gap_n=0, drift_n=0, theta_mu_n=0)) for label, part in facets]
    frame = routing.data(nothing, routing_fits(nothing))
    assert not len(frame)
    assert style.png(routing.draw(frame))
