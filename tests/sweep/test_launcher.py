"""Sweeps from the command to their files, in this process: what runs, what does not run again, what is kept."""

import json

import pytest

from stalefront.app import run
from stalefront.files import read_json
from stalefront.plan import FORMAT
from stalefront.record import read_rows

TWO = ("delay.S=1,2",)


@pytest.fixture
def swept(sweep):
    """A sweep of two cells that has completed."""
    assert sweep.run(*TWO) == 0
    return sweep


def written(sweep):
    """When each file of the sweep was last written."""
    return {path: path.stat().st_mtime_ns for path in sweep.root.rglob("*.json*") if "report" not in path.name}


def test_a_sweep_runs_what_is_missing_and_nothing_else(sweep, capsys):
    assert sweep.run(*TWO) == 0
    assert {name: o["state"] for name, o in sweep.outcomes().items()} == dict.fromkeys(
        ("delay.S=1", "delay.S=2"), "completed"
    )
    plan = read_json(sweep.root / "plan.json")
    assert plan["format"] == FORMAT
    assert plan["sweep"] == {"name": "grid", "question": "", "axes": {"delay.S": [1, 2]}}
    for cell_id, entry in plan["cells"].items():
        config = read_json(sweep.root / "cells" / cell_id / "config.json")
        assert config["cell"] == entry["cell"]
        assert config["overrides"] == entry["overrides"]
        assert config["run"] == {
            "checkpoint_every": 64,
            "keep_checkpoint": False,
            "cache_dir": str(sweep.root / "cache"),
        }
    assert "2 completed" in capsys.readouterr().out

    before = written(sweep)
    assert sweep.run(*TWO) == 0
    assert "2 finished before, 0 to run" in capsys.readouterr().out
    before.pop(sweep.root / "plan.json")
    assert before.items() <= written(sweep).items()

    assert sweep.run("delay.S=1,2,4") == 0
    assert "2 finished before, 1 to run" in capsys.readouterr().out
    assert before.items() <= written(sweep).items()
    assert sweep.claims() == {"delay.S=1": 1, "delay.S=2": 1, "delay.S=4": 1}
    assert read_json(sweep.root / "plan.json")["sweep"]["axes"] == {"delay.S": [1, 2, 4]}


def test_all_runs_from_scratch_and_keeps_what_was_there(swept, numbers):
    folder = swept.cells()["delay.S=1"]
    before = {name: (folder / name).read_bytes() for name in ("outcome.json", "steps.jsonl", "log.txt")}
    assert swept.run("hydra.launcher.rerun=all", *TWO) == 0
    assert {name: (folder / "attempts/1" / name).read_bytes() for name in before} == before
    assert {o["attempt"] for o in swept.outcomes().values()} == {2}
    old, new = (list(read_rows(folder / part / "steps.jsonl")) for part in ("attempts/1", "."))
    assert numbers(old) == numbers(new)
    assert swept.claims() == {"delay.S=1": 2, "delay.S=2": 2}


def test_failed_cells_run_again_and_keep_their_first_outcome(sweep, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{i}>", "answer": str(i)} for i in range(10)]
    good = "".join(json.dumps(row) + "\n" for row in rows)
    data.write_text(good)
    arguments = ("task=file", f"task.path={data}", "task.max_completion_length=3", "seed=0,1")
    cache = sweep.root / "cache"
    cache.parent.mkdir()
    cache.write_text("a file where a folder has to be")
    assert sweep.run(*arguments) == 1
    assert {o["state"] for o in sweep.outcomes().values()} == {"failed"}
    captured = capsys.readouterr()
    assert "2 failed" in captured.out
    assert "log.txt" in captured.err
    name, folder = next(iter(sweep.cells().items()))
    assert "Error" in sweep.outcomes()[name]["reason"]
    assert "Traceback" in (folder / "log.txt").read_text()

    cache.unlink()
    assert sweep.run("hydra.launcher.rerun=failed", *arguments, "steps=4") == 1
    assert "2 not asked for" in capsys.readouterr().out, "other cells were never run, and are not failed"
    assert sweep.run("hydra.launcher.rerun=failed", *arguments) == 0
    assert {o["state"] for o in sweep.outcomes().values() if o} == {"completed"}
    kept = read_json(folder / "attempts/1/outcome.json")
    assert kept["state"] == "failed"
    assert sweep.outcomes()[name]["attempt"] == 2


def test_a_directory_whose_cell_was_edited_is_refused(swept, capsys):
    path = swept.cells()["delay.S=1"] / "config.json"
    config = read_json(path)
    config["cell"]["seed"] = 7
    path.write_text(json.dumps(config))
    before = written(swept)
    assert swept.run("delay.S=1,2,4") == 2
    assert "edited" in capsys.readouterr().err
    assert written(swept) == before


def test_options_that_change_no_number_follow_the_last_command(sweep):
    assert sweep.run("hydra.launcher.rerun=failed", "run.checkpoint_every=3", "seed=0") == 1
    config = next(iter(sweep.cells().values())) / "config.json"
    assert read_json(config)["run"]["checkpoint_every"] == 3
    assert sweep.run("run.checkpoint_every=4", "run.keep_checkpoint=true", "seed=0") == 0
    assert read_json(config)["run"]["checkpoint_every"] == 4
    assert (config.parent / "checkpoint/state.pt").exists()
    assert sweep.run("run.checkpoint_every=5", "seed=0") == 0
    assert read_json(config)["run"]["checkpoint_every"] == 4, "it tells how a finished cell was run"


def test_every_gpu_gets_one_cell_at_a_time(sweep, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    # Who gets which device is seen on a machine that has none.
    monkeypatch.setattr("stalefront.slots.check_gpus", lambda gpus, cells: None)
    rewards = tmp_path / "devices_of_workers.py"
    rewards.write_text(
        "import os\n"
        "def reward(prompts, completions, **columns):\n"
        f"    open(r'{tmp_path}/' + os.environ['CUDA_VISIBLE_DEVICES'], 'a').write(f'{{os.getpid()}}\\n')\n"
        "    return [float(len(c) % 2) for c in completions]\n"
    )
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}>", "answer": str(i)}) + "\n" for i in range(10)))
    arguments = ("task=file", f"task.path={data}", f"task.reward_function={rewards.stem}:reward", "seed=0,1,2")
    assert sweep.run("hydra.launcher.gpus=[3,5]", "task.max_completion_length=3", *arguments) == 0
    seen = {name: set((tmp_path / name).read_text().split()) for name in ("3", "5")}
    assert seen["3"]
    assert seen["5"]
    assert not seen["3"] & seen["5"]
    assert len(seen["3"] | seen["5"]) == 3


def test_a_single_run_has_the_layout_of_a_sweep(in_tmp, capsys, small):
    assert run([*small, "delay.S=2"]) == 0
    (folder,) = (in_tmp / "runs/single/cells").iterdir()
    assert read_json(folder / "outcome.json")["state"] == "completed"
    assert f"Records: runs/single/cells/{folder.name}" in capsys.readouterr().out
    assert run([*small, "delay.S=2"]) == 0
    assert len(list(folder.glob("claim.*"))) == 1
    assert not (in_tmp / "runs/single/report.html").exists()


def test_a_reward_of_the_working_directory_is_found_wherever_the_command_lies(sweep, tmp_path):
    (tmp_path / "my_rewards.py").write_text(
        "def reward(prompts, completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n"
    )
    rows = [json.dumps({"prompt": f"{i}>", "answer": str(i)}) + "\n" for i in range(10)]
    (tmp_path / "data.jsonl").write_text("".join(rows))
    assert sweep.root.parent == tmp_path, "where the command runs"
    arguments = ("task.path=data.jsonl", "task.reward_function=my_rewards:reward", "task.max_completion_length=3")
    process = sweep.start("hydra.launcher.report=false", "task=file", "seed=0", "steps=2", *arguments)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert [o["state"] for o in sweep.outcomes().values()] == ["completed"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("delay.S=1,2", "steps=4"), "other settings: steps (8 there, 4 here). To keep"),
        (("delay.S=1,2", "loss=cispo"), "other settings: loss (grpo there, cispo here). To keep"),
        (("delay.S=4", "seed=3"), None),
        (("delay.S=1,2", "loss=grpo,cispo"), None),
        (("delay.S=1,2",), None),
    ],
)
def test_a_launch_that_mixes_settings_into_a_directory_says_so(sweep, capsys, arguments, said):
    assert sweep.run("hydra.launcher.rerun=failed", *TWO) == 1
    capsys.readouterr()
    sweep.run("hydra.launcher.rerun=failed", *arguments)
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len(warnings) == (said is not None)
    if said:
        assert said in warnings[0]
        assert "hydra.sweep.dir=DIR" in warnings[0]


def test_single_runs_of_any_settings_share_a_folder(in_tmp, capsys, small):
    for steps in (2, 3):
        assert run([*small, f"steps={steps}"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_a_report_that_was_not_built_is_not_named(swept, capsys, monkeypatch):
    def broken(_):
        raise RuntimeError("no report today")

    (swept.root / "report.html").write_text("an old one")
    monkeypatch.setattr("stalefront.analysis.report.build_report", broken)
    assert swept.run(*TWO, "hydra.launcher.report=true") == 1
    captured = capsys.readouterr()
    assert "the report could not be built" in captured.out
    assert "Report:" not in captured.out
