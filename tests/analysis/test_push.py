"""The section on methods: from records of known pushes to sentences, tables, figure and fits.json."""

import json

import pytest

from stalefront.analysis import push
from stalefront.analysis.figures import push as figure
from stalefront.analysis.figures.style import png
from stalefront.analysis.report import build_report
from stalefront.analysis.settings import PushSettings, ReportSettings
from stalefront.analysis.tables import build_table
from stalefront.analysis.verdicts import DEFAULT, FirstZero, RemainsZero

RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
GRID = {"S": (4, 16), "lrs": RATES, "seeds": (0, 1, 2), "steps": 64}


def tis(cap):
    return {"correction": [{"choice": "token_tis", "cap": cap}]}


# Push of each arm, and what its correction did in every step.
ACTED = {"mask_frac": 0.0, "weight_mean": 0.9, "weight_min": 0.2}
IDLE = {"mask_frac": 0.0, "weight_mean": 1.0, "weight_min": 1.0}
ARMS = [{}, tis(2.0), tis(3.0), tis(4.0), tis(5.0)]
PUSHES = (1.0, 2.0, 1.0, 100.0, 0.01)
COLUMNS = ({}, ACTED, IDLE, ACTED, ACTED)
SETTINGS = ReportSettings(definitions=(FirstZero(), RemainsZero()), max_arms=2)


def label(cap):
    return f"correction=token_tis, cap={cap}"


# Its label where no other arm has the correction.
ONLY = "correction=token_tis"


@pytest.fixture(scope="module")
def root(tmp_path_factory, make_sweep):
    return make_sweep(tmp_path_factory.mktemp("push") / "s", arms=ARMS, pushes=PUSHES, columns=COLUMNS, **GRID)


@pytest.fixture(scope="module")
def compared(root):
    (found,) = push.compare(build_table(root, SETTINGS), {})
    return found


def over(compared, arm, definition=DEFAULT):
    return push.pooled(compared.fits[(arm, definition)])["push"]


@pytest.mark.parametrize("definition", ["first_zero", DEFAULT])
def test_known_pushes(compared, definition):
    assert compared.reference.label == "correction=none"
    twice = over(compared, label(2.0), definition)
    assert twice["lo"] == pytest.approx(2.0, rel=0.25)
    assert push.read_push(twice) == push.OUT
    same = over(compared, label(3.0), definition)
    assert same["lo"] == pytest.approx(1.0)
    assert push.read_push(same) == push.SAME
    assert over(compared, label(4.0), definition)["censoring"] == "right"
    assert push.read_push(over(compared, label(5.0), definition)) == push.IN


def test_S_eta50_is_the_constant_of_the_law(compared):
    c = compared.fits[("correction=none", DEFAULT)].constants
    for s in (4, 16):
        assert c[f"S_eta50[S={s}]"].interval.contains(8e-3)
        assert c[f"S_eta50[S={s}]"].value == pytest.approx(8e-3, rel=0.35)


def test_arms_are_in_the_order_of_their_push(compared):
    assert [a.label for a in compared.others] == [label(c) for c in (4.0, 2.0, 3.0, 5.0)]


def test_arms_that_never_acted_are_flagged(compared):
    assert compared.remarks[label(3.0)] == ["inert: never acted (36 runs)"]
    assert compared.remarks[label(2.0)] == []
    frame = figure.data(compared)
    assert [t for t in frame["label"].unique() if "(inert)" in t] == ["token_tis, cap=3.0 (inert)"]


@pytest.mark.parametrize(
    ("row", "arm", "expected"),
    [
        ({"mask_frac_max": 0.0}, {"corrections": ("x",)}, True),
        ({"mask_frac_max": 0.1}, {"corrections": ("x",)}, False),
        ({"weight_off_max": 1e-7}, {"corrections": ("x",)}, True),
        ({"weight_off_max": 0.5, "mask_frac_max": 0.0}, {"corrections": ("x",)}, False),
        # The clip of the loss does not excuse a correction that does nothing.
        ({"mask_frac_max": 0.0, "clip_frac_max": 0.3}, {"corrections": ("x",), "clipped": True}, True),
        ({}, {"corrections": ("x",)}, None),
        ({"clip_frac_max": 0.0}, {"clipped": True}, True),
        ({"clip_frac_max": 0.2}, {"clipped": True}, False),
        ({"clip_frac_max": 0.0}, {"clipped": False}, None),
        ({"mask_frac_max": 0.0}, {"corrections": ("x",), "controllers": ("y",)}, None),
        # The run's own warning, where there is one.
        ({"warnings": "a; inert: ['correction.x', 'loss.grpo']", "mask_frac_max": 0.1}, {"corrections": ("x",)}, True),
        ({"warnings": "inert: ['loss.grpo']", "mask_frac_max": 0.0}, {"corrections": ("x",)}, False),
        ({"warnings": "inert: ['correction.x']"}, {"corrections": ("x", "z")}, False),
        ({"warnings": "inert: ['correction.x']"}, {"corrections": ("x",), "controllers": ("y",)}, False),
        ({"warnings": "inert: ['controller.y']"}, {"controllers": ("y",)}, True),
        ({"warnings": "inert: ['loss.grpo']"}, {}, True),
        ({"last_step": None, "mask_frac_max": 0.0}, {"corrections": ("x",)}, None),
    ],
)
def test_what_counts_as_inert(compared, row, arm, expected):
    names = ("clip_frac_max", "mask_frac_max", "weight_off_max", "warnings")
    like = compared.reference.__class__(
        **{**compared.reference.__dict__, "corrections": (), "controllers": (), "clipped": False, **arm}
    )
    assert push._inert(like, {"last_step": 9, **dict.fromkeys(names), **row}) is expected


def test_reward_is_compared_where_nothing_collapsed(tmp_path, make_sweep):
    shape = {**GRID, "S": (4,), "lrs": (2.5e-4, 5e-4, 4e-3)}
    root = make_sweep(tmp_path / "s", arms=[{}, tis(2.0)], pushes=(1.0, 2.0), **shape)
    (found,) = push.compare(build_table(root, SETTINGS), {})
    assert found.safe == {4: 2.5e-4}
    price = found.prices[ONLY].constants["price"]
    # The synthetic reward depends on seed, S and learning rate alone.
    assert price.value == pytest.approx(0.0, abs=1e-12)
    assert found.prices[ONLY].n == 3
    assert found.prices[ONLY].constants["reward"].value == pytest.approx(0.5, abs=0.1)


def test_without_a_common_safe_cell_arms_are_priced_beside_the_reference(compared):
    assert compared.safe == {}
    assert compared.prices[label(5.0)].constants == {}
    assert compared.prices[label(2.0)].rows == [{"S": 4.0, "lr": 2.5e-4}, {"S": 16.0, "lr": 2.5e-4}]
    assert "for each arm by itself" in push.context(compared, None, 0.95)["price"]


def test_one_seed_has_profile_intervals_and_no_price_interval(tmp_path, make_sweep):
    shape = {**GRID, "seeds": (0,)}
    root = make_sweep(tmp_path / "s", arms=[{}, tis(2.0)], pushes=(1.0, 2.0), **shape)
    (found,) = push.compare(build_table(root, SETTINGS), {})
    push_ = over(found, ONLY)
    assert push_["bootstrap"] is None
    assert push_["lo"] == pytest.approx(2.0, rel=0.2)
    text = push.context(found, None, 0.95)
    assert "too few seeds to resample" in text["limits"]
    row = next(r for r in text["table"].rows if r[0] == ONLY)
    assert "(one seed, no interval)" in row[6]


def test_both_censored_is_not_comparable(tmp_path, make_sweep):
    shape = {**GRID, "seeds": (0,), "lrs": (2.5e-4, 5e-4)}
    root = make_sweep(tmp_path / "s", arms=[{}, tis(2.0)], pushes=(50.0, 100.0), **shape)
    (found,) = push.compare(build_table(root, SETTINGS), {})
    assert push.read_push(over(found, ONLY)) == push.UNKNOWN
    table = push.push_table(found)
    assert table.rows[1][2] == "not comparable"
    assert "1 not comparable" in push.headline(found)
    assert png(figure.draw(figure.data(found)))


def test_cells_without_a_partner_are_counted(tmp_path, make_sweep):
    shape = {**GRID, "seeds": (0,)}
    root = make_sweep(tmp_path / "s", arms=[{}, tis(2.0)], **shape)
    plan = json.loads((root / "plan.json").read_text())
    del plan["cells"]["c1-0004-0.001-0"]
    (root / "plan.json").write_text(json.dumps(plan))
    (found,) = push.compare(build_table(root, SETTINGS), {})
    assert "1 cell without a partner" in found.remarks[ONLY]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"censoring": "none", "lo": 2.0, "hi": 2.0, "outer": [1.5, None]}, "2 [1.5, …]"),
        ({"censoring": "right", "lo": 2.0, "hi": None, "outer": [1.5, None]}, "≥ 2 [≥ 1.5]"),
        ({"censoring": "right", "lo": 2.0, "hi": None, "outer": [2.0, None]}, "≥ 2"),
        ({"censoring": "left", "lo": None, "hi": 0.5, "outer": [None, 0.7]}, "≤ 0.5 [≤ 0.7]"),
        ({"censoring": "left", "lo": None, "hi": 0.5, "outer": [None, None]}, "≤ 0.5 (interval open)"),
        ({"censoring": "both", "lo": None, "hi": None, "outer": None}, "not comparable"),
        (None, "–"),
    ],
)
def test_pushes_in_words(row, text):
    assert push.show_push(row) == text


@pytest.mark.parametrize("n", [3, 12, 40])
def test_the_figure_draws_the_same_bytes(compared, n):
    frame = figure.data(compared)
    some = frame[frame["arm"] == label(2.0)]
    many = frame.iloc[:0]
    for i in range(n):
        many = many._append(some.assign(arm=f"a{i}", label=f"a method with a rather long name, number={i}, and more"))
    first = png(figure.draw(many))
    assert first.startswith(b"\x89PNG")
    assert first == png(figure.draw(many))


@pytest.fixture(scope="module")
def reported(root):
    return build_report(root, settings=SETTINGS)


def test_the_report_has_the_section(reported):
    text = reported.markdown.read_text()
    section = text.partition("## How far each arm pushes the frontier")[2].partition("\n# Arm")[0]
    assert "Reference: **correction=none**. It is the only arm without correction and controller." in section
    assert "of 4 arms held against it, 2 further out, 1 further in, 1 not distinguishable from no push" in text
    assert "| not distinguishable from no push with 72 runs |" in section
    assert "inert: never acted (36 runs)" in section
    assert "paired bootstrap over 3 seeds" in section
    assert "figures/push.png" in section
    assert "S = 16" in section
    page = reported.html.read_text()
    assert 'href="#push1"' in page
    assert 'id="push1"' in page
    assert {"push.png", "push.csv"} <= {p.name for p in reported.figures}


def test_its_numbers_are_in_fits_json(reported):
    fits = json.loads(reported.fits.read_text())["fits"]
    mine = {(f["arm"], f["definition"]): f for f in fits if f["name"] == "push"}
    assert len(mine) == 2 * len(ARMS)
    assert {f["name"] for f in fits} >= {"push", "price"}
    constant = mine[(label(2.0), DEFAULT)]["constants"]["push"]
    ends = constant["interval"]
    assert push.show(constant["value"]) + f" [{push.show(ends['lo'])}, {push.show(ends['hi'])}]" in (
        reported.markdown.read_text()
    )


def test_built_twice_it_is_the_same_bytes(root, reported):
    paths = [reported.html, reported.markdown, reported.table, reported.fits, *reported.figures]
    before = [p.read_bytes() for p in paths]
    build_report(root, settings=SETTINGS)
    assert [p.read_bytes() for p in paths] == before


def test_one_arm_has_no_section(demo):
    assert push.compare(build_table(demo), {}) == []


def test_another_reference(root):
    settings = ReportSettings(definitions=SETTINGS.definitions, push=PushSettings(reference=label(2.0)))
    (found,) = push.compare(build_table(root, settings), {})
    assert push.pooled(found.fits[("correction=none", DEFAULT)])["push"]["lo"] == pytest.approx(0.5, rel=0.25)
    # The uncorrected arm is then not the reference, and each arm is also held against it.
    assert push.pooled(found.own[(label(2.0), DEFAULT)])["push"]["lo"] == pytest.approx(2.0, rel=0.25)
    assert push.pooled(found.own[(label(3.0), DEFAULT)])["push"]["lo"] == pytest.approx(1.0)


def test_without_an_uncorrected_arm_nothing_is_compared(tmp_path, make_sweep):
    root = make_sweep(tmp_path / "s", arms=[tis(2.0), tis(3.0)], S=(4,), lrs=(1e-3,), seeds=(0,))
    assert push.compare(build_table(root, SETTINGS), {}) == []
