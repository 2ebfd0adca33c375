"""Claims: one owner at any moment, and what tells a dead owner from a live one."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from stalefront.claims import EMPTY_GRACE_S, STALE_AFTER_S, is_live, latest, launcher_id, launcher_runs, take
from stalefront.observe import observe
from stalefront.paths import CellPaths

# Each process takes a stale cell over as the pool does, all at the same moment.
RACER = """
import sys, time
from pathlib import Path
from stalefront.claims import take
from stalefront.observe import observe
from stalefront.paths import CellPaths
paths = CellPaths(Path(sys.argv[1]))
seen, attempt = observe(paths), observe(paths).attempt + 1
assert not seen.live
Path(sys.argv[1], "ready").open("a").write(".")
while not Path(sys.argv[1], "go").exists():
    pass
print("won" if take(paths, attempt, sys.argv[2]) else "lost")
sys.stdout.flush()
time.sleep(60)
"""


@pytest.fixture
def paths(tmp_path):
    return CellPaths(tmp_path)


def write_claim(paths, claim):
    paths.claim(claim.attempt).write_text(json.dumps(asdict(claim)))


def dead_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_claim_is_taken_once_and_names_its_owner(paths):
    assert latest(paths) is None
    assert take(paths, 1, "me")
    assert not take(paths, 1, "you")
    claim = latest(paths)
    assert (claim.attempt, claim.pid, claim.launcher) == (1, os.getpid(), "me")
    assert is_live(paths, claim)
    assert observe(paths).attempt + 1 == 2
    assert take(paths, 2, "me")
    assert latest(paths).attempt == 2


@pytest.mark.parametrize(
    ("change", "live"),
    [
        ({}, True),
        ({"pid": "dead"}, False),
        ({"start": 1}, False),  # the pid belongs to another process now
        ({"boot": "an earlier one"}, False),
        ({"host": "elsewhere"}, True),
        ({"pid_namespace": "another container's", "pid": "dead"}, True),
    ],
)
def test_who_is_live(paths, change, live):
    take(paths, 1, "me")
    change = {key: dead_process() if value == "dead" else value for key, value in change.items()}
    claim = replace(latest(paths), **change)
    write_claim(paths, claim)
    assert is_live(paths, latest(paths)) == live


def test_a_claim_of_another_machine_is_stale_when_nothing_was_touched_for_long(paths):
    take(paths, 1, "me")
    write_claim(paths, replace(latest(paths), host="elsewhere"))
    paths.status.write_text("{}")
    old = time.time() - STALE_AFTER_S - 1
    os.utime(paths.claim(1), (old, old))
    assert is_live(paths, latest(paths)), "status.json is young"
    os.utime(paths.status, (old, old))
    assert not is_live(paths, latest(paths))


def test_a_claim_that_its_maker_has_not_written_yet_is_believed_for_a_moment(paths):
    paths.claim(1).touch()
    assert is_live(paths, latest(paths))
    old = time.time() - EMPTY_GRACE_S - 1
    os.utime(paths.claim(1), (old, old))
    assert not is_live(paths, latest(paths))
    assert observe(paths).state == "interrupted"


def test_a_process_that_has_ended_but_was_not_waited_for_is_not_live(paths):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    take(paths, 1, "me")
    write_claim(paths, replace(latest(paths), pid=process.pid, start=None))
    assert is_live(paths, latest(paths))
    process.kill()
    while is_live(paths, latest(paths)):
        time.sleep(0.01)
    process.communicate()


def test_launchers_that_run_are_known():
    assert launcher_runs(launcher_id())
    assert not launcher_runs(f"elsewhere/{os.getpid()}/None")
    assert not launcher_runs(launcher_id() + "0")
    assert not launcher_runs("")


def test_one_of_many_processes_takes_a_stale_claim_over(paths, wait_for):
    take(paths, 1, "me")
    write_claim(paths, replace(latest(paths), pid=dead_process()))
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(paths.root), str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(8)
    ]
    ready = paths.root / "ready"
    wait_for(lambda: ready.exists() and ready.stat().st_size == len(racers))
    (paths.root / "go").touch()
    said = [racer.stdout.readline().strip() for racer in racers]
    winner = latest(paths)
    assert sorted(said) == ["lost"] * 7 + ["won"]
    assert said[int(winner.launcher)] == "won"
    assert (winner.attempt, winner.pid) == (2, racers[int(winner.launcher)].pid)
    assert observe(paths).live
    for racer in racers:
        racer.kill()
        racer.wait()
        racer.stdout.close()
    assert not observe(paths).live
