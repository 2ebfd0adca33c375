"""What is read out of the answers of squeue, scontrol and sacct."""

import os
import stat

import pytest

from stalefront.slurm import queue
from stalefront.slurm.queue import Ended, Queue, QueuedJob, ended, expand, parse_sacct, parse_scontrol, parse_squeue


def test_a_line_of_squeue_for_each_kind_of_job():
    assert parse_squeue("12|3|15|RUNNING|n1|sf-a|None") == QueuedJob("12_3", "sf-a", "RUNNING", "None", "n1")
    alone = parse_squeue("12|N/A|12|PENDING||sf-a|(Nodes required for job are DOWN|DRAINED)")
    assert (alone.key, alone.reason) == ("12", "(Nodes required for job are DOWN|DRAINED)")
    assert not alone.alive
    assert parse_squeue("slurm_load_jobs error: Unable to contact slurm controller") is None


def test_tasks_of_an_array_in_slurms_notation():
    assert expand("7", "3") == ["7_3"]
    assert expand("7", "0-2,5%4") == ["7_0", "7_1", "7_2", "7_5"]


def test_the_end_of_jobs_as_scontrol_tells_it():
    line = "JobId=15 ArrayJobId=12 ArrayTaskId=3 JobName=x JobState=CANCELLED Reason=None ExitCode=0:15 NodeList=n1"
    ((key, end),) = parse_scontrol(line)
    assert key == "12_3"
    assert end.text == "CANCELLED (exit 0:15, on n1)"
    keys = [key for key, _ in parse_scontrol("JobId=12 ArrayJobId=12 ArrayTaskId=4-6%2 JobState=CANCELLED Reason=None")]
    assert keys == ["12_4", "12_5", "12_6"]
    assert [key for key, _ in parse_scontrol("JobId=9 JobState=FAILED Reason=NonZeroExitCode ExitCode=1:0")] == ["9"]


def test_the_end_of_jobs_as_sacct_tells_it():
    assert dict(parse_sacct("12_3|CANCELLED by 1000|0:15|n1")) == {"12_3": Ended("CANCELLED", "0:15", "", "n1")}
    assert [key for key, _ in parse_sacct("12_[4-5%2]|CANCELLED by 0|0:0|None assigned")] == ["12_4", "12_5"]


def test_who_runs():
    jobs = {"1": QueuedJob("1", "a", "RUNNING", "", ""), "2": QueuedJob("2", "b", "PENDING", "", "")}
    found = Queue(jobs)
    assert [found.runs(job, 0) for job in ("1", "2", "3")] == [True, False, False]


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """`tools(name, script)`: a command of Slurm's that answers as the script says, and counts its calls."""

    def make(name, script):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho call >> {tmp_path}/{name}.calls\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    make.calls = lambda name: len((tmp_path / f"{name}.calls").read_text().splitlines())
    return make


def test_a_controller_that_does_not_answer_is_no_empty_queue(tools, monkeypatch):
    tools("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert queue.read_queue() is None
    tools("squeue", "exec sleep 5")
    monkeypatch.setattr(queue, "TIMEOUT_S", 0.2)
    assert queue.read_queue() is None
    tools("squeue", "exit 0")
    assert queue.read_queue() == Queue({})


def test_one_scontrol_an_array_and_sacct_only_for_what_it_forgot(tools):
    lines = "".join(f"JobId=1{i} ArrayJobId=12 ArrayTaskId={i} JobState=FAILED ExitCode=1:0\\n" for i in range(3))
    tools("scontrol", f"if [ $4 = 12 ]; then printf '{lines}'; else echo 'Invalid job id specified' >&2; exit 1; fi")
    tools("sacct", "echo '13|OUT_OF_MEMORY|0:125|n2'")
    found = ended(["12_0", "12_1", "12_2", "13", "14"])
    assert tools.calls("scontrol") == 3
    assert tools.calls("sacct") == 1
    assert found["12_1"].state == "FAILED"
    assert found["13"].text == "OUT_OF_MEMORY (exit 0:125, on n2); raise slurm.mem_gb, or lower hydra.launcher.width"
    assert found["14"].state == "UNKNOWN"


def test_without_slurm_nothing_is_known(monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    assert queue.read_queue() is None
    assert ended(["1"]) == {"1": Ended("UNKNOWN")}
    assert queue.max_array_size() is None
