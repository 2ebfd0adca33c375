"""The state of a cell from its files, in every order in which they can come about."""

import json

import pytest

from stalefront.claims import take
from stalefront.observe import HINT_SAMPLES, observe, read_tail
from stalefront.paths import CellPaths


@pytest.fixture
def paths(tmp_path):
    return CellPaths(tmp_path / "cell")


def put(path, **content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_nothing_is_planned(paths):
    seen = observe(paths)
    assert (seen.state, seen.attempt, seen.live, seen.finished) == ("planned", 0, False, False)
    assert observe(paths).attempt + 1 == 1


def test_a_claim_of_a_live_process_is_running_whatever_an_earlier_attempt_left(paths):
    put(paths.outcome, state="failed", attempt=1, reason="x", last_step=7)
    put(paths.status, state="failed", attempt=1, step=7, reward_val=0.5, steps=9)
    assert (observe(paths).state, observe(paths).reason, observe(paths).step) == ("failed", "x", 7)
    take(paths, 2, "me")
    seen = observe(paths)
    assert (seen.state, seen.attempt, seen.live, seen.recorded) == ("running", 2, True, False)
    put(paths.status, state="running", attempt=2, step=8, reward_val=0.25, steps=9)
    assert (observe(paths).step, observe(paths).reward_val) == (8, 0.25)
    put(paths.outcome, state="completed", attempt=2)
    seen = observe(paths)
    assert (seen.state, seen.finished, seen.recorded, seen.live) == ("completed", True, True, True)


def test_an_outcome_without_claims_counts(paths):
    put(paths.outcome, state="non-finite", attempt=3)
    assert observe(paths).finished
    assert observe(paths).attempt + 1 == 4


def test_a_submitted_cell_is_known_by_its_status(paths):
    put(paths.status, state="submitted", attempt=0)
    assert observe(paths).state == "submitted"


@pytest.mark.parametrize(
    ("passes", "hint"),
    [([0, 0, 0], True), ([9, 0, 0, 0], True), ([0, 0, 1], False), ([0, 0], False), ([], False), ([0, 0, 0, 1], False)],
)
def test_the_hint_pools_the_last_validations(paths, passes, hint):
    samples = HINT_SAMPLES // 3
    rows = [{"step": 0, "reward_val_n": None, "reward_val_passes": None}]
    rows += [{"step": i + 1, "reward_val_n": samples, "reward_val_passes": n} for i, n in enumerate(passes)]
    paths.root.mkdir()
    paths.steps.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "rewa')
    assert read_tail(paths.steps) == (len(passes), hint)


def test_only_the_end_of_a_long_step_file_is_read(paths):
    paths.root.mkdir()
    row = {"reward_val_n": HINT_SAMPLES, "reward_val_passes": 1, "text": "x" * 2000}
    paths.steps.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step in range(500)))
    assert read_tail(paths.steps) == (499, False)
    assert read_tail(paths.root / "none") == (None, False)
