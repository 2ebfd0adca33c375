"""What is shown while cells run: data first, then that it can be drawn."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from stalefront.compose import Planned
from stalefront.labels import clock, duration, only, varying
from stalefront.observe import observe
from stalefront.paths import CellPaths
from stalefront.pool import Pace, Task
from stalefront.progress import LINE_EVERY_S, Progress, labels


@pytest.fixture
def make_task(make_cell, tmp_path):
    """A task of 100 steps, at `step`, that was seen to take `rate` seconds a step."""

    def make(phase, state="running", *, step=0, rate=None, passes=None, **overrides):
        cell = make_cell(steps=100, **overrides)
        paths = CellPaths(tmp_path / cell.cell_id)
        if passes is not None:
            paths.root.mkdir()
            row = {"step": step, "reward_val_n": 400, "reward_val_passes": passes}
            paths.steps.write_text(json.dumps(row) + "\n")
        seen = replace(observe(paths), state=state, step=step, live=phase == "here", reward_val=0.25)
        planned = Planned(cell, {}, tuple(f"{key}={value}" for key, value in overrides.items()))
        pace = Pace() if rate is None else Pace((1, 10.0), (step, 10.0 + (step - 1) * rate))
        return Task(planned, paths, seen, phase, pace=pace)

    return make


@pytest.fixture
def tasks(make_task):
    return [
        make_task("over", "completed", step=100, rate=0.2, passes=9, seed=0),
        make_task("over", "completed", step=100, rate=0.2, passes=0, seed=1),
        make_task("here", step=50, rate=0.2, passes=0, seed=2),
        make_task("over", "failed", step=7, seed=3),
        make_task("waiting", "planned", seed=4),
    ]


def test_counts_and_the_time_that_is_left(tasks):
    progress = Progress("name", tasks, 2)
    counts = progress.counts()
    assert (counts["done"], counts["running"], counts["collapsed"], counts["failed"]) == (2, 1, 2, 1)
    # 0.2 s a step: 50 steps of one cell and 100 of another, two at a time, but the longer one cannot be split.
    assert progress.seconds_left() == pytest.approx(20.0)
    assert progress.line() == "2 of 5 cells done, 1 running, 2 collapsed so far (hint), 1 failed, about 20 s left"


def test_time_left_goes_by_the_nearest_staleness(make_task):
    tasks = [
        make_task("over", "completed", step=100, rate=1.0, **{"delay.S": 1}),
        make_task("over", "completed", step=100, rate=0.1, **{"delay.S": 16}),
        make_task("waiting", "planned", **{"delay.S": 2}),
        make_task("waiting", "planned", **{"delay.S": 64}),
    ]
    assert Progress("name", tasks, 1).seconds_left() == pytest.approx(110.0)
    assert Progress("name", tasks[2:], 1).seconds_left() is None


def test_the_pace_of_a_cell_leaves_out_its_start(make_task):
    pace = Pace()
    for step, now in ((0, 1.0), (0, 9.0), (4, 10.0), (4, 11.0), (14, 12.0), (14, 20.0)):
        pace.note(step, now)
    assert pace.seconds_per_step == pytest.approx(0.2)
    short = make_task("over", "completed", step=100)
    short.began, short.ended = 10.0, 12.0
    assert Progress("name", [short, make_task("waiting", "planned", seed=1)], 1).seconds_left() == pytest.approx(2.0)


def test_a_terminal_shows_running_cells_and_says_what_the_hint_is(tasks):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140)
    console.print(Progress("name", tasks, 2, console).table())
    shown = out.getvalue()
    assert "seed=2" in shown
    assert "0.25 collapsed" in shown
    assert "the verdict is in the report" in shown
    assert "seed=4" not in shown


def test_elsewhere_a_line_comes_every_ten_seconds_and_a_failure_at_once(tasks, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("stalefront.progress.time.monotonic", lambda: now[0])
    tasks[3].ended = 50.0
    with Progress("name", tasks, 2) as progress:
        for _ in range(30):
            now[0] += 1
            progress()
    said = capsys.readouterr().out
    assert said.count("cells done") == 30 // LINE_EVERY_S
    assert said.count("failed: S=4 lr=0.0005 seed=3") == 1
    assert "[00:10]" in said


def test_labels_name_what_varies(make_task):
    tasks = [make_task("here", loss=loss, seed=seed) for loss in ("grpo", "cispo") for seed in (0, 1)]
    assert set(labels(tasks).values()) == {
        f"S=4 lr=0.0005 seed={seed} loss={loss}" for loss in ("grpo", "cispo") for seed in (0, 1)
    }
    assert varying([["a=1", "b=1"], ["a=1", "b=2"], ["a=1", "c"]]) == {"b", "c"}
    assert only({"b"}, ["a=1", "b=2"]) == ["b=2"]


def test_times_in_words():
    assert [clock(s) for s in (5, 200, 3800)] == ["00:05", "03:20", "1:03:20"]
    assert [duration(s) for s in (40, 200, 9000)] == ["40 s", "3 min", "2.5 h"]
