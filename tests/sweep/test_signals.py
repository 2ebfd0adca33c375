"""What kills and stops do to a sweep: a cell, its launcher, two launchers at once, and Ctrl-C."""

import os
import signal
from pathlib import Path

import pytest

from stalefront.files import read_json
from stalefront.observe import observe
from stalefront.paths import CellPaths
from stalefront.record import read_rows

# Long enough to be met at work, with a checkpoint every other step.
LONG = ("steps=120", "run.checkpoint_every=2", "hydra.launcher.workers=2")
NO_REPORT = "hydra.launcher.report=false"


def rows_of(folder):
    """Whole rows of a cell's step file."""
    steps = folder / "steps.jsonl"
    return steps.read_bytes().count(b"\n") if steps.exists() else 0


def kill_owner(folder):
    """SIGKILL to the process that holds the only claim of a cell."""
    os.kill(read_json(folder / "claim.1")["pid"], signal.SIGKILL)


def running(sweep):
    """Folders of cells that have a live owner and a first checkpoint behind them."""
    if not (sweep.root / "plan.json").exists():
        return []
    cells = list(sweep.cells().values())
    return [folder for folder in cells if observe(CellPaths(folder)).live and rows_of(folder) >= 5]


def steps_of(folder):
    return [row["step"] for row in read_rows(folder / "steps.jsonl")]


def end(process):
    """Exit code and what was printed."""
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


def test_a_killed_worker_fails_its_cell_alone_and_running_again_heals_it(sweep, wait_for):
    process = sweep.start(*LONG, "seed=0,1,2")
    victim = wait_for(lambda: running(sweep))[0]
    kill_owner(victim)
    code, out = end(process)
    assert code == 1, out
    assert "2 completed, 1 failed" in out
    assert "signal 9 (SIGKILL)" in out
    assert (sweep.root / "report.html").exists()
    dead = read_json(victim / "outcome.json")
    other = next(o for o in sweep.outcomes().values() if o["state"] == "completed")
    assert dead.keys() == other.keys()
    assert (dead["state"], dead["attempt"]) == ("failed", 1)
    assert dead["last_step"] == steps_of(victim)[-1]

    assert sweep.run(*LONG, "seed=0,1,2") == 0
    healed = read_json(victim / "outcome.json")
    assert (healed["state"], healed["attempt"]) == ("completed", 2)
    assert healed["resumed_from_step"] > 0
    assert steps_of(victim) == list(range(121))
    assert read_json(victim / "attempts/1/outcome.json") == dead
    assert sorted(sweep.claims().values()) == [1, 1, 2]


def test_cells_outlive_a_killed_launcher_and_are_not_run_twice(sweep, wait_for):
    process = sweep.start(*LONG, NO_REPORT, "seed=0,1,2")
    alive = wait_for(lambda: len(running(sweep)) == 2 and running(sweep))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()  # its cells hold the other end
    pids = {folder: read_json(folder / "claim.1")["pid"] for folder in alive}
    assert sweep.run(*LONG, "seed=0,1,2") == 0
    assert list(sweep.claims().values()) == [1, 1, 1]
    for folder in sweep.cells().values():
        assert read_json(folder / "outcome.json")["state"] == "completed"
        assert steps_of(folder) == list(range(121))
    assert all(read_json(folder / "status.json")["pid"] == pid for folder, pid in pids.items())


def test_two_launchers_at_once_run_every_cell_once(sweep):
    both = [sweep.start("steps=20", NO_REPORT, "seed=0,1,2,3", "hydra.launcher.workers=1") for _ in range(2)]
    for process in both:
        code, out = end(process)
        assert code == 0, out
        assert "4 completed" in out
    assert list(sweep.claims().values()) == [1, 1, 1, 1]
    for folder in sweep.cells().values():
        assert steps_of(folder) == list(range(21))
        assert (folder / "log.txt").read_text().count("--- attempt") == 1


def test_a_cell_is_taken_over_once_its_launcher_and_its_process_are_gone(sweep, wait_for):
    first = sweep.start(*LONG, NO_REPORT, "seed=0")
    (folder,) = wait_for(lambda: running(sweep))
    pid = read_json(folder / "claim.1")["pid"]
    os.kill(pid, signal.SIGSTOP)
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdout.close()
    second = sweep.start(*LONG, NO_REPORT, "seed=0")
    assert "0 to run, 1 running in other processes" in second.stdout.readline()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: observe(CellPaths(folder)).state == "interrupted" or (folder / "claim.2").exists())
    code, out = end(second)
    assert code == 0, out
    outcome = read_json(folder / "outcome.json")
    assert (outcome["state"], outcome["attempt"]) == ("completed", 2)
    assert outcome["resumed_from_step"] > 0
    assert steps_of(folder) == list(range(121))


def test_what_another_launcher_was_stopped_with_goes_on_here(sweep, wait_for):
    first = sweep.start(*LONG, NO_REPORT, "seed=0")
    (folder,) = wait_for(lambda: running(sweep))
    second = sweep.start(*LONG, NO_REPORT, "seed=0")
    assert "0 to run, 1 running in other processes" in second.stdout.readline()
    first.send_signal(signal.SIGINT)
    code, out = end(first)
    assert code == 130, out
    code, out = end(second)
    assert code == 0, out
    outcome = read_json(folder / "outcome.json")
    assert (outcome["state"], outcome["attempt"]) == ("completed", 2)
    assert outcome["resumed_from_step"] > 0
    assert steps_of(folder) == list(range(121))
    assert read_json(folder / "attempts/1/outcome.json")["state"] == "interrupted"


@pytest.mark.parametrize(("number", "report"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_stop_ends_in_order_and_the_next_command_goes_on(sweep, wait_for, number, report):
    process = sweep.start(*LONG, f"hydra.launcher.report={report}", "seed=0,1,2")
    wait_for(lambda: running(sweep))
    # As a terminal, or `timeout`, does it: to every process of the group.
    os.killpg(process.pid, number)
    code, out = end(process)
    assert code == 128 + number, out
    assert "stopping" in out
    assert "Traceback" not in out
    assert (sweep.root / "report.html").exists() == report
    states = [observe(CellPaths(folder)).state for folder in sweep.cells().values()]
    assert "interrupted" in states
    assert set(states) <= {"interrupted", "planned"}
    assert sweep.run(*LONG, "seed=0,1,2") == 0
    for folder in sweep.cells().values():
        assert steps_of(folder) == list(range(121))


def test_cells_are_followed_when_their_parent_is_gone(sweep, wait_for):
    process = sweep.start(*LONG, NO_REPORT, "seed=0,1")
    folders = wait_for(lambda: len(running(sweep)) == 2 and running(sweep))
    worker = read_json(folders[0] / "claim.1")["pid"]
    parent = int((Path(f"/proc/{worker}/stat").read_text()).rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGTERM)  # which it does not hear
    os.kill(parent, signal.SIGKILL)
    code, out = end(process)
    assert code == 0, out
    assert {o["state"] for o in sweep.outcomes().values()} == {"completed"}
    assert list(sweep.claims().values()) == [1, 1]


def test_a_second_stop_is_at_once(sweep, wait_for):
    process = sweep.start("steps=4000", NO_REPORT, "seed=0")
    (folder,) = wait_for(lambda: running(sweep))
    pid = read_json(folder / "claim.1")["pid"]
    os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "stopping" in process.stdout.readline())
    process.send_signal(signal.SIGINT)
    code, out = end(process)
    assert code == 130, out
    assert read_json(folder / "outcome.json")["state"] == "interrupted"
    assert not observe(CellPaths(folder)).live
