"""The sections on mismatch and replay: which arms are an axis, what is read from the records, what is said."""

import json
import math

import pytest

from stalefront.analysis import mismatch
from stalefront.analysis.axes import find_axes, settings_of
from stalefront.analysis.fits.base import Constant, Fit, Interval
from stalefront.analysis.fits.interaction import ADDITIVE, CHANGES, GROWS, OPEN, SHRINKS
from stalefront.analysis.report import build_report
from stalefront.analysis.tables import build_table

NOISE = [{"choice": "logit_noise", "strength": 1.0, "sigma": 0.1}]
# Midway between the steps of the constants, so that the noise of a seed moves no run across.
RATES = tuple(4e-3 * 2.0 ** (i - 3.5) for i in range(6))


@pytest.fixture(scope="module")
def levels(make_sweep, tmp_path_factory):
    """Three levels of noise whose constants stand 1 : ½ : ¼, two seeds."""
    arms = [{"mismatch": NOISE, "target_kl": v} for v in (0.0, 1e-2, 1e-1)]
    root = tmp_path_factory.mktemp("levels") / "levels"
    return make_sweep(root, arms=arms, pushes=[1.0, 0.5, 0.25], S=(1, 4), lrs=RATES, steps=32)


def gap(kind, lag):
    return {"none": None, "r2": 4e-4 * lag, "r3": 1e-3 + 1e-4 * lag}[kind]


@pytest.fixture(scope="module")
def routed(cell_config, step_rows, write_cell, write_plan, tmp_path_factory):
    """Replay none, r2, r3 at one S and rate of flips, three seeds; a gap at every step but the first of a batch."""
    root, cells = tmp_path_factory.mktemp("routed") / "routed", {}
    for kind in ("none", "r2", "r3"):
        for seed in range(3):
            replay = {"choice": kind, "probe_every": 0 if kind == "none" else 1}
            cells[f"{kind}-{seed}"] = cell_config(S=8, lr=1e-3, seed=seed, steps=32, replay=replay)
    write_plan(root, cells)
    for cell_id, cell in cells.items():
        kind = cell["replay"]["choice"]
        rows = step_rows(cell)
        for row in rows[1:]:
            lag = row["lag_mean_updates"] = row["step_in_batch"] - 1
            row |= {
                "replay_gap_k3_nats": gap(kind, lag),
                "mismatch_k3_nats": 1e-3,
                "theta_mu_k3_nats": 2e-3 + 1e-4 * lag,
            }
            row |= {"route_drift_frac": None if kind == "none" else 0.01 * lag, "expert_flip_frac": 0.1}
        write_cell(root, cell_id, cell, rows)
    return root


def test_arms_that_differ_in_one_group_are_an_axis(levels):
    table = build_table(levels).table
    (axis,) = find_axes(settings_of(levels, table), ("mismatch.target_kl",))
    assert (axis.group, axis.key, axis.name) == ("mismatch", "mismatch.target_kl", "")
    assert [(v.label, v.size) for v, _ in axis.levels] == [("none", 0.0), ("0.01", 0.01), ("0.1", 0.1)]
    assert {arm for _, arm in axis.levels} == set(table["arm"])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"a": {"loss.choice": "grpo"}, "b": {"loss.choice": "cispo"}}, []),
        ({"a": {"replay.choice": "none"}}, []),
        (
            {"a": {"replay.choice": "r2"}, "b": {"replay.choice": "none"}},
            [("replay", "", ["none", "r2"])],
        ),
        (
            # Two losses, each with and without: two axes, named by the loss.
            {
                f"{v}{m}": {"loss.choice": v, "loss.beta": b, "mismatch.choice": m}
                for v, b in (("grpo", 0.0), ("cispo", 0.1))
                for m in ("none", "fp8")
            },
            [("mismatch", "loss=cispo", ["none", "fp8"]), ("mismatch", "loss=grpo", ["none", "fp8"])],
        ),
        (
            # No setting alone tells the three apart: all that vary name a level.
            {
                "a": {"mismatch.choice": "none"},
                "b": {"mismatch.choice": "top_p", "mismatch.top_p.p": 0.9},
                "c": {"mismatch.choice": "top_p", "mismatch.top_p.p": 0.5},
            },
            [("p", "", ["none", "0.5", "0.9"])],
        ),
        (
            {
                "a": {"mismatch.choice": "x", "mismatch.s": 1},
                "b": {"mismatch.choice": "x", "mismatch.s": 2},
                "c": {"mismatch.choice": "y", "mismatch.s": 1},
            },
            [("mismatch", "", ["mismatch=x, s=1", "mismatch=x, s=2", "mismatch=y, s=1"])],
        ),
    ],
    ids=["no group", "one level", "replay", "two families", "option", "several settings"],
)
def test_axes(settings, expected):
    found = find_axes(settings)
    assert [(a.key.split(".")[-1], a.name, [v.label for v, _ in a.levels]) for a in found] == expected


def test_the_section_has_the_losses_it_was_made_with(levels):
    sweep = build_table(levels)
    (section,) = mismatch.sections(levels, sweep)
    assert [f.definition for f in section.fits] == ["first_zero", "remains_zero"]
    for fit in section.fits:
        assert fit.constants["loss_dex[0.01]"].interval.contains(math.log10(2))
        assert fit.constants["loss_dex[0.1]"].value == pytest.approx(math.log10(4), abs=0.15)
        assert fit.n == len(sweep.table)
    said = dict(section.context["said"])["remains_zero"]
    assert said[0].startswith("Loss against none, if it is the same at every S, with 95% intervals: 0.01: ")
    assert f"n = {len(sweep.table)} cells" in said[0]
    assert "p = " in said[1]


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (ADDITIVE, "Additive in log η: the loss is the same factor at every S"),
        (GROWS, "Not additive: it grows with S"),
        (SHRINKS, "Not additive: it shrinks with S"),
        (CHANGES, "Not additive: it depends on S, but not in the same direction"),
        (OPEN, "Whether the loss depends on S cannot be told from these cells"),
    ],
)
def test_the_words_of_each_verdict(verdict, words):
    loss, change = (Constant(0.3, Interval(0.1, 0.5, "profile", 0.95), "dex", t) for t in ("", "loss at S=1 to S=4"))
    fit = Fit(
        **{"name": "interaction", "definition": "d", "arm": "all", "n": 9, "n_events": 4, "n_left": 0, "n_right": 0},
        **{"n_undecided": 1, "method": "", "settings": {"reference": "none", "level": 0.95}, "input_hash": ""},
        constants={"loss_dex[x]": loss, "change_dex[x]": change},
        rows=[{"level": None, "verdict": verdict, "decided_by": "all", "beta": None}],
        tests={"p_all": 0.2},
    )
    said = mismatch.say_interaction(fit)
    assert "1 cell left out as undecided" in said[0]
    assert said[1].startswith(words)
    assert ("more seeds would tell" in said[-1]) == (verdict == OPEN)


@pytest.mark.parametrize(
    ("ends", "text"),
    [((0.2, None), "≥ 0.2 dex"), ((None, 0.4), "≤ 0.4 dex"), ((None, None), "not identified (all runs ended alike)")],
)
def test_bounds_are_shown_as_bounds(ends, text):
    assert mismatch.show_dex(Constant(None, Interval(*ends, "profile", 0.95), "dex", "")) == text


def test_a_single_learning_rate_has_no_loss(make_sweep, tmp_path):
    root = make_sweep(tmp_path / "s", arms=[{"target_kl": 0.0}, {"target_kl": 0.1}], lrs=(1e-3,), steps=16)
    assert mismatch.sections(root, build_table(root)) == []


def test_rows_of_replay_are_summed_by_lag(routed):
    sweep = build_table(routed)
    axes = find_axes(settings_of(routed, sweep.table), ("replay",))
    rows = mismatch.routing_rows(routed, sweep, axes)
    assert len(rows) == 9 * 8
    mine = rows[(rows["cell_id"] == "r2-1") & (rows["lag"] == 5)].iloc[0]
    assert (mine["gap_n"], mine["old_mu_n"]) == (4, 4)
    assert mine["gap_sum"] == pytest.approx(4 * 5 * 4e-4)
    assert (rows[rows["replay"] == "none"]["gap_n"] == 0).all()


def test_when_replay_starts_to_bias(routed):
    (section,) = mismatch.sections(routed, build_table(routed))
    starts = {f.settings["replay"]: f.constants for f in section.fits}
    assert starts["r2"]["start_updates"].value == 3
    assert starts["r3"]["start_updates"].value is None
    assert starts["r3"]["start_whole_updates"].value == 1
    said = {name: " ".join(s) for name, s in section.context["said"]}
    assert "replay starts to bias at a lag of 3 updates [3, 3], bootstrap" in said["replay=r2"]
    assert "does not start to bias within the lags of this grid (0 to 7 updates)" in said["replay=r3"]


def test_rows_after_the_first_zero_do_not_count(routed, tmp_path):
    sweep = build_table(routed)
    axes = find_axes(settings_of(routed, sweep.table), ("replay",))
    table = sweep.table.assign(first_zero_event=True, first_zero_step_hi=8)
    rows = mismatch.routing_rows(routed, type(sweep)(table, *[getattr(sweep, n) for n in REST]), axes)
    assert (rows[rows["replay"] == "r2"]["gap_n"] == 1).all()


REST = ("curves", "cosines", "plan", "fixed", "settings", "arms")


def test_no_column_of_replay_no_section(make_sweep, tmp_path):
    arms = [{"replay": {"choice": c, "probe_every": 0}} for c in ("none", "r3")]
    root = make_sweep(tmp_path / "s", arms=arms, lrs=(1e-3,), steps=16)
    assert mismatch.sections(root, build_table(root)) == []


@pytest.mark.parametrize("name", ["levels", "routed"])
def test_the_report_has_the_section_and_its_numbers_in_fits_json(name, request):
    root = request.getfixturevalue(name)
    files = build_report(root)
    (section,) = mismatch.sections(root, build_table(root))
    for page in (files.markdown.read_text(), files.html.read_text()):
        assert section.context["title"] in page
        assert all(s.split(":")[0] in page for _, sentences in section.context["said"] for s in sentences)
    fits = json.loads(files.fits.read_text())["fits"]
    assert [f for f in fits if f["name"] == section.fits[0].name] == [f.to_json() for f in section.fits]
    assert {f"{section.figure}.png", f"{section.figure}.csv"} <= {p.name for p in files.figures}
