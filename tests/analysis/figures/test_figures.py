"""Figures: their data is what the table says, and they draw the same bytes twice, whatever there is to draw."""

import numpy as np
import pytest

from stalefront.analysis.figures import cosine, frontier_map, reward_curves, style, t_eta
from stalefront.analysis.report import fit_arm
from stalefront.analysis.tables import build_table


@pytest.fixture(scope="module")
def read(demo):
    found = build_table(demo)
    return found, list(fit_arm(found, "all").values())


def cell(frame, definition, S, lr):
    rows = frame[(frame["layer"] == "cell") & (frame["definition"] == definition)]
    return rows[(rows["S"] == S) & (rows["lr"] == lr)].to_dict("records")[0]


def test_frontier_map_counts_seeds_and_marks_disagreement(read):
    sweep, fits = read
    frame = frontier_map.data(sweep.table, "all", fits)
    assert (frame["layer"] == "cell").sum() == 2 * 12
    both = [cell(frame, d, 4, 4e-3) for d in ("first_zero", "remains_zero")]
    assert [c["n_collapsed"] for c in both] == [2, 0]
    assert all(c["differs"] for c in both)
    assert cell(frame, "first_zero", 16, 4e-3)["n_collapsed"] == 2
    assert not cell(frame, "first_zero", 16, 4e-3)["differs"]
    missing = cell(frame, "first_zero", 1, 1e-3)
    assert (missing["n_planned"], missing["n_decided"], missing["states"]) == (2, 1, "1 missing")
    assert cell(frame, "first_zero", 1, 8e-3)["states"] == "1 failed"


def test_frontier_map_carries_contour_and_brackets_of_its_definition(read):
    sweep, fits = read
    frame = frontier_map.data(sweep.table, "all", fits)
    contours = frame[frame["layer"] == "contour"]
    assert set(contours["definition"]) == {"first_zero", "remains_zero"}
    assert contours["S"].max() == pytest.approx(16)
    brackets = frame[(frame["layer"] == "bracket") & (frame["definition"] == "remains_zero")]
    assert len(brackets) == 3
    assert frontier_map.data(sweep.table, "all", [])["layer"].unique().tolist() == ["cell"]


def test_reward_curves_hold_every_point_and_event(read):
    sweep, _ = read
    frame = reward_curves.data(sweep.table, sweep.curves, "all", 60)
    lines = frame[frame["layer"] == "line"]
    assert len(lines) == len(sweep.curves)
    events = frame[frame["layer"] == "event"]
    flags = sweep.table[["first_zero_event", "remains_zero_event"]].map(lambda e: e is True)
    assert len(events) == flags.to_numpy().sum()
    assert frame.attrs["note"] == ""


def test_reward_curves_are_thinned_and_say_so(read):
    sweep, _ = read
    frame = reward_curves.data(sweep.table, sweep.curves, "all", 6)
    assert len(frame[frame["layer"] == "state"]) <= 6
    assert "of 3 values of S" in frame.attrs["note"]


def test_many_seeds_become_median_and_range(tmp_path, make_sweep):
    sweep = build_table(make_sweep(tmp_path / "s", S=(4,), lrs=(1e-3,), seeds=range(7), steps=16))
    frame = reward_curves.data(sweep.table, sweep.curves, "all", 60)
    assert set(frame["layer"]) == {"band", "state"}
    band = frame[frame["layer"] == "band"]
    assert (band["reward_lo"] <= band["reward"]).all()
    assert style.png(reward_curves.draw(frame))


def test_cosines_within_and_at_refresh_are_apart(read):
    sweep, _ = read
    frame = cosine.data(sweep.table, sweep.cosines, "all")
    means = frame.groupby("where")["cosine"].mean()
    assert means["within"] == pytest.approx(0.6, abs=0.05)
    assert means["refresh"] == pytest.approx(0.08, abs=0.05)
    assert "within" not in set(frame[frame["S"] == 1]["where"])


def test_t_eta_shows_events_and_censored_runs(read):
    sweep, fits = read
    frame = t_eta.data(sweep.table, "all", fits)
    strict = frame[frame["definition"] == "remains_zero"]
    counts = strict["layer"].value_counts()
    events = sweep.table["remains_zero_event"]
    survived = (events == False) & (sweep.table["end"] == "horizon")  # noqa: E712  (object column with None)
    assert 0 < survived.sum() < (events == False).sum(), "one that stopped early has not survived"  # noqa: E712
    assert counts["event"] == (sweep.table["remains_zero_event"] == True).sum()  # noqa: E712
    assert counts["censored"] == survived.sum()
    assert counts["mean"] == 1
    assert (strict[strict["layer"] == "event"]["lo"] <= strict[strict["layer"] == "event"]["hi"]).all()


@pytest.mark.parametrize("module", [frontier_map, reward_curves, cosine, t_eta], ids=lambda m: m.__name__[-12:])
def test_the_same_data_draw_the_same_bytes(read, module):
    sweep, fits = read
    frame = {
        frontier_map: lambda: frontier_map.data(sweep.table, "all", fits),
        reward_curves: lambda: reward_curves.data(sweep.table, sweep.curves, "all", 60),
        cosine: lambda: cosine.data(sweep.table, sweep.cosines, "all"),
        t_eta: lambda: t_eta.data(sweep.table, "all", fits),
    }[module]()
    first = style.png(module.draw(frame))
    assert first.startswith(b"\x89PNG")
    assert b"Software" not in first
    assert first == style.png(module.draw(frame))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.6e-6, "1.6e-6"),
        (2e-7, "2e-7"),
        (0.25, "0.25"),
        (12345.0, "1.23e4"),
        (-1.217, "-1.22"),
        (9.999e-4, "1e-3"),
        (float("inf"), "inf"),
    ],
)
def test_numbers(value, text):
    assert style.number(value) == text


def test_thinning_keeps_the_ends():
    assert style.thin(list(range(100)), 5) == [0, 25, 50, 74, 99]
    assert style.thin([1, 2], 5) == [1, 2]


def test_edges_meet_halfway():
    assert style.edges([0.0, 2.0, 3.0]) == [(-1.0, 1.0), (1.0, 2.5), (2.5, 3.5)]
    assert style.edges([4.0]) == [(3.5, 4.5)]
    assert style.edges([]) == []


@pytest.mark.parametrize(
    ("rewards", "low", "high"), [([0.0, 0.0], 0, 1), ([0.2, 0.6], 0, 1), ([-3.0, 5.0], -3, 5), ([2.0, 40.0], 0, 40)]
)
def test_shares_are_drawn_on_the_whole_of_zero_to_one(read, rewards, low, high):
    sweep, _ = read
    curves = sweep.curves.assign(reward=np.resize(rewards, len(sweep.curves)))
    figure = reward_curves.draw(reward_curves.data(sweep.table, curves, "all", 60))
    bottom, top = figure.axes[0].get_ylim()
    assert low - 0.1 * (high - low) <= bottom <= low
    assert high <= top <= high + 0.2 * (high - low)
