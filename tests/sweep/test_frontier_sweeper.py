"""`hydra/sweeper=frontier` from the command line: what is searched, what is refused, and real searches."""

import os
import signal
from pathlib import Path

import pytest
import yaml

from hydra_plugins.stalefront_sweeper.frontier import FrontierSweeper
from stalefront.app import run
from stalefront.choice import OptionError
from stalefront.files import locked, read_json
from stalefront.paths import SweepPaths
from stalefront.search.arms import read_space
from stalefront.search.options import SearchOptions
from stalefront.sweepfiles import NamedSweep

INTERVAL = "optimizer.lr=interval(1e-4,1e-2)"
OPTIONS = {
    **{"runs_per_arm": 8, "batch": None, "verdict": "remains_zero"},
    **{"collapsed_prob": 0.85, "tolerance": None, "points_per_decade": 8},
}
FRONTIER = (
    *("hydra/sweeper=frontier", "hydra.sweeper.runs_per_arm=3", "hydra.sweeper.verdict=below_start"),
    *("validation.num_samples=160", "optimizer.lr=interval(1e-4,1e2)", "seed=0,1"),
)


def sweep_of(axes, fixed=None):
    return NamedSweep("mine", "", axes, fixed or {}, "")


@pytest.fixture
def space_of(composer, small):
    def read(*arguments, axes=None, fixed=None, per_decade=4):
        typed = [f"{key}=choice({value})" for key, value in (text.split("=") for text in small)]
        return read_space(composer, sweep_of(axes or {}, fixed), [*typed, *arguments], per_decade, print)

    return read


def test_arms_are_the_product_of_all_axes_but_learning_rate_and_seed(space_of):
    space = space_of(INTERVAL, "delay.S=1,4", "loss=grpo,cispo", "seed=range(3,6)")
    assert sorted(arm.label for arm in space.arms) == [
        *("loss=cispo delay.S=1", "loss=cispo delay.S=4", "loss=grpo delay.S=1", "loss=grpo delay.S=4"),
    ]
    assert space.seeds == (3, 4, 5)
    assert space.lr_K == (1e-4, 1.78e-4, 3.16e-4, 5.62e-4, 1e-3, 1.78e-3, 3.16e-3, 5.62e-3, 1e-2)
    cell = space.arms[0].cell_overrides(3.16e-4, 5)
    assert cell[-2:] == ("optimizer.lr=0.000316", "seed=5")


def test_an_arm_keeps_its_id_however_it_is_asked_for(space_of):
    alone = space_of(INTERVAL, "delay.S=choice(4)").arms[0]
    assert alone.label == "all"
    among = space_of("optimizer.lr=interval(1e-3,1)", "seed=1,2", "loss=cispo,grpo", "delay.S=4,8").arms
    assert [arm.label for arm in among if arm.arm_id == alone.arm_id] == ["loss=grpo delay.S=4"]
    assert space_of(INTERVAL, "delay.S=choice(4)", "loss.epsilon=0.3,0.4").arms[0].arm_id != alone.arm_id


def test_cells_are_those_of_a_grid(space_of, composer):
    space = space_of(INTERVAL, "delay.S=choice(4)")
    typed = [text for text in space.arms[0].overrides if not text.startswith("seed")]
    ours = composer.cell(space.arms[0].cell_overrides(3.16e-4, 0)).cell.cell_id
    assert ours == composer.cell((*typed, "optimizer.lr=3.16e-4")).cell.cell_id


@pytest.mark.parametrize(
    ("arguments", "axes", "ends"),
    [
        ((INTERVAL,), {"optimizer.lr": [1e-6, 1e-5]}, (1e-4, 1e-2)),
        ((), {"optimizer.lr": [1e-3, 1e-5, 1e-4]}, (1e-5, 1e-3)),
        ((), {"optimizer.lr": "interval(1e-5,1e-4)"}, (1e-5, 1e-4)),
        (("optimizer.lr=1e-1,1e-3",), {}, (1e-3, 1e-1)),
        ((INTERVAL,), {}, (1e-4, 1e-2)),
    ],
)
def test_the_interval(space_of, arguments, axes, ends):
    space = space_of(*arguments, axes=axes)
    assert (space.lr_K[0], space.lr_K[-1]) == ends
    assert space.seeds == (0,)


@pytest.mark.parametrize(
    ("arguments", "fixed", "part"),
    [
        ((), {}, "interval"),
        ((), {"optimizer.lr": 1e-3}, "no fixed value"),
        (("optimizer.lr=choice(1e-3)",), {}, "two or more positive"),
        (("optimizer.lr=interval(0,1e-3)",), {}, "two or more positive"),
        (("optimizer.lr=interval(1e-3,1.2e-3)",), {}, "two candidates"),
        (("optimizer.lr=a,b",), {}, "two or more positive"),
        ((INTERVAL, "seed=-1,0"), {}, "seed"),
        ((INTERVAL, "delay.S=1,0"), {}, "delay.S"),
        ((INTERVAL, "delay.T=1,2"), {}, "delay.T"),
        ((INTERVAL, "task.max_completion_length=8,9999"), {}, "max_position_embeddings"),
    ],
)
def test_what_cannot_be_searched(space_of, arguments, fixed, part):
    with pytest.raises(OptionError, match=part):
        space_of(*arguments, fixed=fixed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("runs_per_arm", v) for v in (0, 1.5, True, None)),
        *(("batch", v) for v in (0, "all")),
        *(("collapsed_prob", v) for v in (0.5, 1.0, "high", None)),
        *(("tolerance", v) for v in (0.0, 0.036, "fine")),
        *(("points_per_decade", v) for v in (0, None)),
        ("verdict", "never"),
    ],
)
def test_options_that_make_no_sense(field, value):
    with pytest.raises(OptionError, match=f"hydra.sweeper.{field}"):
        SearchOptions(**{**OPTIONS, field: value})
    assert SearchOptions(**{**OPTIONS, "tolerance": 0.04, "batch": 3}).batch == 3


def test_defaults_are_legal():
    defaults = yaml.safe_load((Path(__file__).parents[2] / "conf/hydra/sweeper/frontier.yaml").read_text())
    assert defaults.pop("_target_").endswith(FrontierSweeper.__name__)
    assert FrontierSweeper(**defaults).options == SearchOptions(**OPTIONS)


@pytest.mark.parametrize(
    ("option", "part"),
    [
        (("hydra/launcher=slurm", "hydra.launcher.wait=false"), "hydra.launcher.wait"),
        (("hydra/launcher=slurm", "hydra.launcher.dry_run=true"), "hydra.launcher.dry_run"),
        (("hydra.launcher.rerun=all",), "hydra.launcher.rerun"),
        (("hydra.sweeper.verdict=never",), "hydra.sweeper.verdict"),
        (("hydra/launcher=basic",), "hydra/launcher"),
        (("delay.S=0,4",), "delay.S"),
    ],
)
def test_refused_before_anything_is_written(sweep, capsys, option, part):
    plain = [text for text in sweep.arguments(*FRONTIER) if not text.startswith("hydra.launcher.report")]
    assert run([*plain, *option]) == 2
    assert part in capsys.readouterr().err
    assert not sweep.root.exists()


def test_two_arms_are_searched_to_their_report(sweep, capsys):
    assert sweep.run(*FRONTIER, "delay.S=1,4", "hydra.launcher.report=true") == 0
    out = capsys.readouterr().out
    assert "6 finished before, 0 to run" in out
    assert "90% interval" in out
    assert "(assumed: hydra.sweeper.collapsed_prob)" in out
    assert set(sweep.claims().values()) == {1}
    found = read_json(sweep.root / "search.json")
    assert [(arm["label"], len(arm["runs"])) for arm in found["arms"]] == [("delay.S=1", 3), ("delay.S=4", 3)]
    planned = read_json(sweep.root / "plan.json")["cells"]
    assert {run["cell_id"] for arm in found["arms"] for run in arm["runs"]} == set(planned)
    assert (sweep.root / "report.html").exists()
    table = (sweep.root / "table.csv").read_text()
    for one in (one for arm in found["arms"] for one in arm["runs"]):
        row = next(line for line in table.splitlines() if line.startswith(one["cell_id"]))
        assert f",{one['lr']!r}," in row

    assert sweep.run(*FRONTIER, "delay.S=1,4") == 0
    assert "6 cells told before" in capsys.readouterr().out
    assert len(sweep.cells()) == 6


def test_a_killed_search_goes_on_and_one_is_led_by_one_process(sweep, wait_for, capsys):
    led = sweep.start(*FRONTIER, "hydra.launcher.report=false", "delay.S=4,8")
    try:
        wait_for(lambda: (sweep.root / "cells").exists() and list(sweep.root.glob("cells/*/status.json")))
        assert sweep.run(*FRONTIER, "delay.S=4,8") == 2
        assert "no other process" in capsys.readouterr().err
    finally:
        os.killpg(led.pid, signal.SIGKILL)
        led.communicate()
    with locked(SweepPaths(sweep.root).search_lock, wait=False):
        pass
    assert sweep.run(*FRONTIER, "delay.S=4,8") == 0
    assert {outcome["state"] for outcome in sweep.outcomes().values()} <= {"completed", "non-finite"}
    found = read_json(sweep.root / "search.json")
    assert [len(arm["runs"]) for arm in found["arms"]] == [3, 3]
    assert len(sweep.cells()) == 6
