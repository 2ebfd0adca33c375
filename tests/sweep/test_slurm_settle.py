"""The last word about cells whose job has ended, and who is alive on another node."""

import json
import time

import pytest

from stalefront.claims import Claim, is_live, slurm_job
from stalefront.files import read_json, write_json
from stalefront.observe import observe
from stalefront.paths import SweepPaths
from stalefront.slurm import settle as settling
from stalefront.slurm.batches import Batch, new_name, read_batches, write_batch
from stalefront.slurm.job import OwnJob, is_wanted
from stalefront.slurm.queue import Ended, Queue, QueuedJob
from stalefront.slurm.settle import settle

CANCELLED = Ended("CANCELLED", "0:15", "None", "n1")


@pytest.fixture
def paths(tmp_path):
    return SweepPaths(tmp_path)


def batch_of(*jobs, **changes):
    cells = [list(job) for job in jobs]
    base = {cell: 0 for job in cells for cell in job}
    known = {
        **{"name": "b", "job_name": "sf-b", "submitted_utc": "", "profile": {}, "code": {}, "cells": cells},
        **{"base": base, "fresh": False, "dry_run": False, "options": {}, "job": "7"},
    }
    return Batch(**{**known, **changes})


def make_cell(paths, cell_id, **files):
    root = paths.cell(cell_id).root
    root.mkdir(parents=True)
    write_json(root / "config.json", {"cell_id": cell_id, "cell": {"steps": 8}, "run": {}, "overrides": []})
    for name, content in files.items():
        write_json(root / name.replace("_", "."), content)
    return paths.cell(cell_id)


def claim(job, attempt=1, restart=0):
    """A claim of another machine."""
    made = Claim(attempt, "elsewhere", "boot", "pid", 17, 1, "elsewhere/1/1", "", job, restart)
    return json.loads(json.dumps(made.__dict__))


def outcome(state, attempt=1, reason="", job="7_0"):
    return {"state": state, "attempt": attempt, "reason": reason, "last_step": 3, "job": job}


@pytest.fixture
def slurm(monkeypatch):
    """`slurm(queue, **ends)`: what Slurm says from now on; sleeping takes no time."""

    def say(*queued, end=CANCELLED):
        jobs = {key: QueuedJob(key, "sf-b", state, "None", "n1") for key, state in queued}
        monkeypatch.setattr(settling, "read_queue", lambda: Queue(jobs))
        monkeypatch.setattr(settling, "ended", lambda keys: dict.fromkeys(keys, end))
        return Queue(jobs)

    return say


def settled(paths):
    slept = []
    left = settle(paths, sleep=slept.append)
    return left, slept


def test_a_cell_that_ran_fails_with_slurms_reason(paths, slurm):
    write_batch(paths, batch_of(["a"], ["b"]))
    cell = make_cell(paths, "a", claim_1=claim("7_0"))
    other = make_cell(paths, "b", claim_1=claim("7_1"))
    slurm(("7_1", "RUNNING"))
    assert settled(paths) == (1, [settling.GRACE_S])
    word = read_json(cell.outcome)
    assert (word["state"], word["attempt"], word["host"], word["job"]) == ("failed", 1, "elsewhere", "7_0")
    assert word["reason"] == "Slurm job 7_0: CANCELLED (exit 0:15, on n1)"
    assert read_json(other.outcome) is None
    assert not next(read_batches(paths)).closed


def test_a_cell_that_had_not_begun_fails_as_a_new_attempt_and_keeps_the_earlier_outcome(paths, slurm):
    write_batch(paths, batch_of(["a"], ["c"], base={"a": 2, "c": 1}))
    cell = make_cell(paths, "a", outcome_json=outcome("failed", 2, "boom"))
    done = make_cell(paths, "c", outcome_json=outcome("completed", 1))
    slurm(end=Ended("NODE_FAIL"))
    assert settled(paths)[0] == 0
    word = read_json(cell.outcome)
    assert (word["state"], word["attempt"]) == ("failed", 3)
    assert word["reason"] == "Slurm job 7_0 ended before the cell began: NODE_FAIL"
    assert read_json(cell.attempt(2) / "outcome.json")["reason"] == "boom"
    assert read_json(done.outcome)["state"] == "completed"


def test_a_stopped_cell_is_failed_when_its_job_was_cancelled_and_told_why_otherwise(paths, slurm):
    for end, state in ((CANCELLED, "failed"), (Ended("PREEMPTED"), "interrupted")):
        write_batch(paths, batch_of(["a"]))
        cell = paths.cell("a")
        if not cell.root.exists():
            make_cell(paths, "a", claim_1=claim("7"))
        write_json(cell.outcome, outcome("interrupted", 1, "asked to stop", job="7"))
        slurm(end=end)
        settled(paths)
        word = read_json(cell.outcome)
        assert (word["state"], word["attempt"]) == (state, 1)
        assert word["reason"] == f"asked to stop; Slurm job 7: {end.text}"


def test_settling_twice_changes_nothing(paths, slurm):
    write_batch(paths, batch_of(["a"], ["b"]))
    cells = [make_cell(paths, "a", claim_1=claim("7_0")), make_cell(paths, "b", outcome_json=outcome("interrupted"))]
    slurm()
    settled(paths)
    before = [cell.outcome.read_bytes() for cell in cells]
    assert [batch.closed for batch in read_batches(paths, closed=True)] == [True]
    write_batch(paths, batch_of(["a"], ["b"]))
    assert settled(paths) == (0, [])
    assert [cell.outcome.read_bytes() for cell in cells] == before


def test_a_cell_that_goes_on_in_another_job_is_left_alone(paths, slurm):
    write_batch(paths, batch_of(["a"]))
    cell = make_cell(paths, "a", claim_1=claim("7"), claim_2=claim("9", 2))
    slurm(("9", "RUNNING"))
    settled(paths)
    assert read_json(cell.outcome) is None


def test_a_silent_controller_settles_nothing(paths, monkeypatch):
    write_batch(paths, batch_of(["a"]))
    cell = make_cell(paths, "a", claim_1=claim("7"))
    monkeypatch.setattr(settling, "read_queue", lambda: None)
    assert settle(paths) is None
    assert read_json(cell.outcome) is None


def test_a_batch_without_number_is_found_by_name(paths, slurm):
    write_batch(paths, batch_of(["a"], ["b"], job=None))
    make_cell(paths, "a", claim_1=claim("7_0"))
    make_cell(paths, "b")
    slurm(("7_0", "RUNNING"), ("7_1", "PENDING"))
    assert settled(paths) == (2, [])
    assert next(read_batches(paths)).job == "7"


def test_batch_names_sort_and_never_meet(paths):
    first = new_name(paths)
    (paths.jobs / first).mkdir(parents=True)
    assert new_name(paths) > first


def test_slurm_knows_who_is_alive_on_another_node(paths):
    cell = make_cell(paths, "a", claim_1=claim("7_0"), status_json={"state": "running", "attempt": 1, "step": 2})
    running = Queue({"7_0": QueuedJob("7_0", "x", "RUNNING", "", "")})
    waiting = Queue({"7_0": QueuedJob("7_0", "x", "PENDING", "", "")})
    assert observe(cell, running).live
    for queue in (waiting, Queue({})):
        seen = observe(cell, queue)
        assert (seen.live, seen.state, seen.step) == (False, "interrupted", 2)
    # Without Slurm the times of its files decide, which were written just now.
    assert observe(cell).live


def test_an_outcome_ends_a_process_that_cannot_be_looked_up(paths):
    cell = make_cell(paths, "a", claim_1=claim("7_0"), outcome_json=outcome("completed"))
    queue = Queue({"7_0": QueuedJob("7_0", "x", "RUNNING", "", "")})
    assert not observe(cell, queue).live


def test_a_job_knows_that_its_earlier_runs_are_over(paths, monkeypatch):
    for name, value in (("SLURM_ARRAY_JOB_ID", "7"), ("SLURM_ARRAY_TASK_ID", "0"), ("SLURM_RESTART_COUNT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert slurm_job() == ("7_0", 1)
    monkeypatch.setattr("stalefront.slurm.job.read_queue", lambda: pytest.fail("its own job needs no question"))
    cell = make_cell(paths, "a", claim_1=claim("7_0", restart=0))
    assert not observe(cell, OwnJob()).live
    assert OwnJob().runs("7_0", 1)


def test_other_jobs_are_asked_about_once(monkeypatch):
    asked = []
    monkeypatch.setattr("stalefront.slurm.job.read_queue", lambda: asked.append(1))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    own = OwnJob()
    assert [own.runs("5", 0), own.runs("6", 0)] == [None, None]
    assert len(asked) == 1


def test_claims_written_before_jobs_were_known_are_read(paths):
    old = claim("")
    del old["job"], old["restart"]
    cell = make_cell(paths, "a", claim_1=old)
    assert observe(cell).job == ""
    assert is_live(cell, Claim(**old))


def test_what_a_requeued_job_still_has_to_do(paths):
    def seen(state, attempt):
        cell = make_cell(paths, f"{state}{attempt}", outcome_json=outcome(state, attempt))
        return observe(cell)

    assert is_wanted(seen("failed", 1), 1, fresh=False)
    assert not is_wanted(seen("failed", 2), 1, fresh=False)
    assert is_wanted(seen("interrupted", 2), 1, fresh=False)
    assert not is_wanted(seen("completed", 1), 1, fresh=False)
    assert is_wanted(seen("completed", 3), 3, fresh=True)
    assert not is_wanted(seen("completed", 4), 3, fresh=True)


def test_heartbeats_are_read_from_the_open_file(paths, monkeypatch):
    cell = make_cell(paths, "a", claim_1=claim(""))
    monkeypatch.setattr(time, "time", lambda: cell.claim(1).stat().st_mtime + 10**4)
    assert not observe(cell).live
