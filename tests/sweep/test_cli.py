"""The command `stalefront` on a directory of recorded files and a queue that is made up."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from stalefront.claims import place, start_of
from stalefront.cli import main
from stalefront.commands import cancel as cancelling
from stalefront.commands import logs as logging
from stalefront.commands import snapshot
from stalefront.files import read_json, write_json
from stalefront.paths import SweepPaths
from stalefront.slurm.batches import Batch, write_batch
from stalefront.slurm.queue import Queue, QueuedJob

ELSEWHERE = ("far", "boot", "pids")


class Recorded:
    """A sweep directory made by hand: cells of seeds 0 … with whatever files a test writes."""

    def __init__(self, root, cells):
        self.paths = SweepPaths(root)
        self.ids = [cell.cell_id for cell in cells]
        entries = {c.cell_id: {"overrides": ["steps=8", f"seed={c.seed}"], "cell": c.as_dict()} for c in cells}
        sweep = {"name": "mine", "question": "", "axes": {"seed": [c.seed for c in cells]}}
        write_json(self.paths.plan, {"format": 1, "sweep": sweep, "cells": entries})

    def __call__(self, command, *arguments):
        return main([command, str(self.paths.root), *map(str, arguments)])

    def end(self, seed, state, attempt=1, **known):
        outcome = {"cell_id": self.ids[seed], "state": state, "attempt": attempt, "reason": "", "last_step": 5, **known}
        write_json(self.paths.cell(self.ids[seed]).outcome, outcome)

    def begin(self, seed, attempt=1, *, where=ELSEWHERE, pid=1, launcher="far/1/1", job="", utc="2024-01-01T00:00:00Z"):
        claim = dict(zip(("host", "boot", "pid_namespace"), where, strict=True))
        claim |= {"attempt": attempt, "pid": pid, "start": start_of(pid), "launcher": launcher, "utc": utc, "job": job}
        cell = self.paths.cell(self.ids[seed])
        write_json(cell.claim(attempt), claim)
        write_json(cell.status, {"state": "running", "attempt": attempt, "step": 3, "steps": 8, "host": where[0]})

    def log(self, seed, text):
        cell = self.paths.cell(self.ids[seed])
        cell.root.mkdir(parents=True, exist_ok=True)
        cell.log.write_text(text)

    def submit(self, *jobs, job="7", base=0, **known):
        """A batch whose jobs hold cells of these seeds."""
        cells = [[self.ids[seed] for seed in seeds] for seeds in jobs]
        known = {"fresh": False, "dry_run": False} | known
        count = len(list(self.paths.jobs.glob("*")))
        batch = Batch(
            name=f"2024-{count}",
            job_name=f"sf-mine-{count}",
            submitted_utc="",
            profile={"name": "cpu"},
            code={},
            cells=cells,
            base=dict.fromkeys((one for job in cells for one in job), base),
            options={},
            job=job,
            **known,
        )
        write_batch(self.paths, batch)
        return batch


@pytest.fixture
def recorded(tmp_path, make_cell):
    """Three planned cells, none begun."""
    return Recorded(tmp_path, [make_cell(seed=seed) for seed in range(3)])


@pytest.fixture
def queue(monkeypatch):
    """`queue(("7_0", "PENDING", "Priority"), …)` is what squeue says from now on; `queue(None)`: no answer."""
    asked = []

    def says(*jobs):
        def read():
            asked.append(time.monotonic())
            return Queue({job[0]: queued(*job) for job in jobs})

        monkeypatch.setattr(snapshot, "has_squeue", lambda: True)
        monkeypatch.setattr(snapshot, "read_queue", (lambda: None) if jobs == (None,) else read)
        return asked

    def queued(key, state, why, name="sf"):
        return QueuedJob(key, name, state, why, "")

    return says


@pytest.mark.parametrize("command", ["report", "table", "status", "logs", "cancel", "retry"])
def test_a_folder_that_is_no_sweep_is_an_error(tmp_path, capsys, command):
    assert main([command, str(tmp_path / "none"), *(["x"] if command == "logs" else [])]) == 2
    error = capsys.readouterr().err
    assert "a sweep directory: a folder with a plan.json" in error
    assert "runs/default" in error


def test_help_lists_every_command_in_a_line(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    # argparse starts a new line behind the longest name.
    text = capsys.readouterr().out.replace("import-config\n", "import-config ")
    lines = [line.split() for line in text.splitlines() if line.startswith("    ")]
    found = [words[0] for words in lines if len(words) > 2]
    assert found == ["status", "logs", "cancel", "retry", "report", "table", "doctor", "parity", "import-config"]


@pytest.mark.parametrize("watch", [[], ["--watch"]])
def test_status_shows_every_cell_with_what_varies_and_what_needs_a_look_first(recorded, capsys, watch):
    recorded.end(1, "failed", reason="exit\ncode 3")
    recorded.end(2, "completed")
    assert recorded("status", *watch) == 0
    head, names, *rows = capsys.readouterr().out.splitlines()
    assert head == "mine: 3 cells: 1 failed, 1 planned, 1 completed"
    assert names.split() == ["cell", "state", "attempt", "step", "of", "S", "lr", "seed", "reason"]
    lr = f"{recorded_lr(recorded):g}"
    assert [row.split() for row in rows] == [
        [recorded.ids[1], "failed", "1", "5", "8", "4", lr, "1", "exit", "code", "3"],
        [recorded.ids[0], "planned", "8", "4", lr, "0"],
        [recorded.ids[2], "completed", "1", "5", "8", "4", lr, "2"],
    ]


def recorded_lr(recorded):
    return read_json(recorded.paths.plan)["cells"][recorded.ids[0]]["cell"]["optimizer"]["lr"]


def test_status_of_some_states(recorded, capsys):
    recorded.end(1, "failed")
    assert recorded("status", "--state", "failed,running") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == [recorded.ids[1]]
    assert recorded("status", "--state", "completed") == 0
    assert "no cell is completed" in capsys.readouterr().out
    assert recorded("status", "--state", "done") == 2
    assert "--state = 'done' is not possible. Legal: failed, interrupted" in capsys.readouterr().err


def test_a_cell_whose_job_has_not_begun_it_is_submitted(recorded, capsys, queue):
    recorded.end(0, "failed", reason="exit code 1")
    recorded.submit([0], [1, 2], base=1)
    asked = queue(("7_0", "PENDING", "Priority"), ("7_1", "RUNNING", "None"), ("99", "RUNNING", "None"))
    recorded.begin(1, attempt=2, job="7_1")
    assert recorded("status") == 0
    head, line, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "mine: 3 cells: 1 running, 2 submitted"
    assert line == "Slurm: 1 job runs, 1 pending (Priority)"
    assert [row.split()[:2] for row in rows] == [
        [recorded.ids[1], "running"],
        [recorded.ids[0], "submitted"],
        [recorded.ids[2], "submitted"],
    ]
    assert rows[1].split()[-2:] == ["7_0", "Priority"]
    assert rows[2].endswith("7_1        its job runs other cells first")
    assert len(asked) == 1


def test_what_a_job_does_with_cells_it_has_begun(recorded, queue):
    recorded.end(0, "interrupted", job="7_0", reason="asked to stop")
    recorded.end(1, "failed", job="7_1")
    recorded.end(2, "completed", job="7_2")
    recorded.submit([0], [1], [2])
    queue(("7_0", "PENDING", "BeginTime"), ("7_1", "RUNNING", "None"), ("7_2", "RUNNING", "None"))
    rows = {row.cell_id: row for row in shown(recorded).rows}
    requeued = rows[recorded.ids[0]]
    assert (requeued.state, requeued.reason) == ("interrupted", "asked to stop; its job goes on (BeginTime)")
    assert [rows[one].goes_on for one in recorded.ids] == [True, False, False]


def shown(recorded):
    from stalefront.commands.planned import Sweep

    return snapshot.take_snapshot(Sweep.read(recorded.paths.root), snapshot.look_at_queue(recorded.paths))


@pytest.mark.parametrize(("fresh", "state"), [(True, "submitted"), (False, "completed")])
def test_a_finished_cell_is_submitted_when_its_job_starts_it_over(recorded, queue, fresh, state):
    recorded.end(0, "completed")
    recorded.submit([0], base=1, fresh=fresh)
    queue(("7", "PENDING", "Resources"))
    assert next(row.state for row in shown(recorded).rows if row.cell_id == recorded.ids[0]) == state


def test_a_job_that_left_the_queue_before_its_cell_began_is_named(recorded, queue):
    recorded.submit([0])
    queue()
    first = shown(recorded).rows[0]
    assert (first.state, first.reason) == ("planned", "job 7 left the queue before the cell began")
    assert not shown(recorded).goes_on


def test_a_process_that_began_after_the_queue_was_asked_runs(recorded, queue):
    recorded.submit([0], [1])
    queue(("7_0", "PENDING", "None"))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    recorded.begin(0, job="7_0", utc=now)
    recorded.begin(1, job="7_1")
    states = {row.cell_id: row.state for row in shown(recorded).rows}
    assert [states[one] for one in recorded.ids] == ["running", "interrupted", "planned"]


def test_a_batch_without_a_number_is_found_by_its_name(recorded, queue):
    batch = recorded.submit([0], [1], job=None)
    queue(("31_0", "PENDING", "Priority", batch.job_name), ("31_1", "PENDING", "Priority", batch.job_name))
    assert shown(recorded).counts == {"submitted": 2, "planned": 1}
    assert read_json(recorded.paths.jobs / batch.name / "batch.json")["job"] is None


@pytest.mark.parametrize("installed", [True, False])
def test_without_an_answer_the_files_decide(recorded, capsys, queue, monkeypatch, installed):
    recorded.submit([0], [1])
    queue(None)
    monkeypatch.setattr(snapshot, "has_squeue", lambda: installed)
    recorded.begin(0, job="7_0")
    assert recorded("status") == 0
    head, problem, *_ = capsys.readouterr().out.splitlines()
    assert head == "mine: 3 cells: 1 running, 2 planned"
    assert ("does not answer" if installed else "not installed") in problem
    assert shown(recorded).goes_on


def test_nobody_is_asked_without_an_open_batch(recorded, queue):
    recorded.submit([0], closed=True)
    asked = queue()
    shown(recorded)
    assert not asked


def test_a_dry_run_that_nobody_submitted_is_no_problem(recorded, capsys, queue):
    recorded.submit([0], job=None, dry_run=True)
    queue(None)
    assert recorded("status") == 0
    assert "answer" not in capsys.readouterr().out


def test_watch_ends_when_nothing_runs_or_waits(recorded, capsys, queue, monkeypatch):
    from stalefront.commands import status

    recorded.submit([0])
    queue(("7", "PENDING", "Priority"))
    monkeypatch.setattr(status, "QUEUE_EVERY_S", 0.0)
    monkeypatch.setattr(status.time, "sleep", lambda _: (recorded.end(0, "completed"), queue()))
    assert recorded("status", "--watch") == 0
    assert "1 completed" in capsys.readouterr().out


def test_a_directory_that_may_not_be_written_is_an_error(recorded, capsys, monkeypatch):
    def refuse(_):
        raise PermissionError(13, "Permission denied", "runs/theirs")

    monkeypatch.setattr(snapshot, "read_batches", refuse)
    assert recorded("cancel") == 2
    assert "runs/theirs = 'Permission denied' is not possible" in capsys.readouterr().err


def test_ctrl_c_is_130(recorded, monkeypatch):
    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshot, "read_batches", stop)
    assert recorded("status") == 130


@pytest.mark.parametrize("text", ["seed=1", "seed=1 delay.S=4", "S=4 seed=1.0", "loss=grpo seed=1", "id", "prefix"])
def test_a_cell_is_found_by_what_only_it_has(recorded, text):
    from stalefront.commands.planned import Sweep

    wanted = recorded.ids[1]
    text = {"id": wanted, "prefix": wanted[:8]}.get(text, text)
    assert Sweep.read(recorded.paths.root).find(text) == wanted


@pytest.mark.parametrize(("text", "says"), [("delay.S=4", "It fits 3:"), ("S=5", "Give its id"), ("zz", "Give its id")])
def test_a_text_that_fits_not_one_cell_is_an_error(recorded, capsys, text, says):
    recorded.log(0, "x")
    assert recorded("logs", text) == 2
    error = capsys.readouterr().err
    assert f"CELL = {text!r} is not possible" in error
    assert says in error
    if "3" in says:
        assert all(f"{one} seed={seed}" in error for seed, one in enumerate(recorded.ids))


def test_logs_of_a_cell_and_of_one_attempt(recorded, capsys):
    recorded.log(0, "--- attempt 1, pid 5\none\ntwo\n--- attempt 2, pid 6\nthree\n")
    recorded.begin(0, attempt=2)
    recorded.end(0, "failed", attempt=2, reason="exit code 1")
    assert recorded("logs", "seed=0") == 0
    out = capsys.readouterr().out
    assert "log.txt: cell" in out.splitlines()[0]
    assert "is failed at step 3, attempt 2: exit code 1" in out.splitlines()[0]
    assert out.splitlines()[1:] == ["--- attempt 1, pid 5", "one", "two", "--- attempt 2, pid 6", "three"]
    assert recorded("logs", "seed=0", "--attempt", 1) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["--- attempt 1, pid 5", "one", "two"]
    assert recorded("logs", "seed=0", "--lines", 1) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["three"]
    assert recorded("logs", "seed=0", "--attempt", 3) == 2
    assert "Legal: an attempt that wrote a log: 1 to 2" in capsys.readouterr().err


def test_logs_of_an_attempt_that_was_set_aside(recorded, capsys):
    cell = recorded.paths.cell(recorded.ids[0])
    cell.attempt(1).mkdir(parents=True)
    (cell.attempt(1) / "log.txt").write_text("--- attempt 1, pid 5\nold\n")
    recorded.log(0, "--- attempt 2, pid 6\nnew\n")
    assert recorded("logs", "seed=0", "--attempt", 1) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "attempts/1/log.txt" in head
    assert lines[1:] == ["old"]


def test_logs_of_a_cell_that_never_began_is_its_jobs(recorded, capsys):
    batch = recorded.submit([0], [1], closed=True)
    (recorded.paths.jobs / batch.name / "7_1_0_log.out").write_text("No module named torch\n")
    recorded.log(1, "an attempt before\n")
    recorded.end(1, "failed", attempt=2, job="7_1", reason="Slurm job 7_1 ended before the cell began")
    assert recorded("logs", "seed=1") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["No module named torch"]
    assert recorded("logs", "seed=0") == 2
    assert "Legal: a cell that has begun. It is planned" in capsys.readouterr().err


def test_logs_of_the_job_of_a_cell(recorded, capsys):
    for job in ("7", "8"):
        batch = recorded.submit([0], job=job, closed=True)
        (recorded.paths.jobs / batch.name / f"{job}_0_log.out").write_text(f"job {job}\n")
    recorded.begin(0, attempt=1, job="7")
    recorded.begin(0, attempt=2, job="8")
    recorded.log(0, "own\n")
    assert recorded("logs", "seed=0", "--job") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["job 8"]
    assert recorded("logs", "seed=0", "--job", "--attempt", 1) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["job 7"]


def test_following_ends_with_the_cell(recorded, capsys, monkeypatch):
    recorded.log(0, "one\n")
    recorded.begin(0, where=place(), pid=os.getpid())
    more = iter(["two\n", "three\n"])

    def append(_):
        text = next(more, None)
        if text is None:
            recorded.end(0, "completed")
            recorded.begin(0, where=place(), pid=2**22 + 1)
        else:
            with recorded.paths.cell(recorded.ids[0]).log.open("a") as log:
                log.write(text)

    monkeypatch.setattr(logging, "FOLLOW_EVERY_S", 0.0)
    monkeypatch.setattr(logging.time, "sleep", append)
    assert recorded("logs", "seed=0", "--follow") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:-1] == ["one", "two", "three"]
    assert "is completed" in lines[-1]


def test_nothing_to_cancel_is_no_error(recorded, capsys):
    recorded.end(0, "completed")
    assert recorded("cancel") == 0
    assert "nothing to cancel" in capsys.readouterr().out
    assert recorded("cancel", "seed=0") == 0
    assert f"cell {recorded.ids[0]} is completed" in capsys.readouterr().out


@pytest.fixture
def scancelled(monkeypatch, queue):
    """Numbers given to scancel, after which the queue is empty; settling is left out."""
    told = []

    def run(command):
        told.append(command[1:])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(cancelling, "run", run)
    monkeypatch.setattr(cancelling, "read_queue", lambda: Queue({}))
    monkeypatch.setattr(cancelling, "settle", lambda _: 0)
    return told


def test_cancel_takes_the_jobs_of_this_sweep_alone(recorded, capsys, queue, scancelled):
    recorded.submit([0], [1], report_job="9")
    recorded.submit([2], job="8", report_job="9")
    queue(*((key, "PENDING", "Priority") for key in ("7_0", "7_1", "8", "9", "99", "7")))
    assert recorded("cancel") == 0
    assert scancelled == [["7", "8", "9"]]
    out = capsys.readouterr().out
    assert "cancelled 3 jobs: 7_0, 7_1, 8" in out
    assert "cancelled job 9, which would have written the report" in out


def test_cancelling_a_cell_spares_the_others_of_its_job(recorded, capsys, queue, scancelled):
    recorded.submit([0, 1], [2], report_job="9")
    queue(*((key, "PENDING", "Priority") for key in ("7_0", "7_1", "9")))
    assert recorded("cancel", "seed=0") == 2
    error = capsys.readouterr().err
    assert f"job 7_0 also holds {recorded.ids[1]} seed=1" in error
    assert "--whole-job" in error
    assert not scancelled
    assert recorded("cancel", "seed=0", "--whole-job") == 0
    assert scancelled == [["7_0"]]
    assert recorded("cancel", "seed=0", "seed=1") == 0
    assert scancelled == [["7_0"], ["7_0"]]


def test_cancelling_a_cell_ends_its_job_when_the_others_have_finished(recorded, queue, scancelled):
    recorded.submit([0, 1])
    recorded.end(1, "completed", job="7")
    queue(("7", "RUNNING", "None"))
    assert recorded("cancel", "seed=0") == 0
    assert scancelled == [["7"]]


def test_an_unknown_queue_cannot_be_cancelled(recorded, capsys, queue, scancelled):
    recorded.submit([0])
    queue(None)
    assert recorded("cancel") == 2
    assert "the Slurm controller does not answer" in capsys.readouterr().err
    assert not scancelled


def test_jobs_that_stay_are_said(recorded, capsys, queue, scancelled, monkeypatch):
    recorded.submit([0])
    queue(("7", "RUNNING", "None"))
    monkeypatch.setattr(cancelling, "read_queue", lambda: None)
    monkeypatch.setattr(cancelling, "WAIT_S", 0.0)
    assert recorded("cancel") == 1
    assert "1 of them are still in the queue" in capsys.readouterr().err


@pytest.fixture
def process():
    """A process that waits; SIGTERM ends it."""
    with subprocess.Popen(["sleep", "60"]) as running:
        yield running
        running.kill()


def launcher_of(process, start=None):
    return f"{place()[0]}/{process.pid}/{start or start_of(process.pid)}"


def test_cancel_stops_a_local_launcher(recorded, capsys, process):
    recorded.begin(0, where=place(), pid=process.pid, launcher=launcher_of(process))
    assert recorded("cancel") == 0
    assert process.wait(10) == -signal.SIGTERM
    assert f"the launcher (pid {process.pid}) is asked to stop" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["seed=0"]])
def test_where_the_launcher_is_gone_or_one_cell_is_meant_the_cells_process_is_asked(recorded, capsys, process, words):
    launcher = launcher_of(process, start=1) if not words else f"{place()[0]}/{os.getpid()}/{start_of(os.getpid())}"
    recorded.begin(0, where=place(), pid=process.pid, launcher=launcher)
    assert recorded("cancel", *words) == 0
    assert process.wait(10) == -signal.SIGTERM
    assert f"the process of cell {recorded.ids[0]}" in capsys.readouterr().out


def test_a_pid_that_was_given_to_another_process_is_left_alone(process):
    assert not cancelling.terminate(process.pid, start_of(process.pid) + 1)
    assert not cancelling.terminate(process.pid, None)
    assert not cancelling.terminate(2**22 + 1, 5)
    assert process.poll() is None


def test_what_runs_on_another_machine_is_said(recorded, capsys):
    recorded.begin(0)
    assert recorded("cancel") == 1
    assert "1 cells run on far" in capsys.readouterr().err


def test_retry_runs_what_has_not_finished(sweep, capsys):
    assert sweep.run("seed=0,1") == 0
    capsys.readouterr()
    paths = SweepPaths(sweep.root)
    done = main(["retry", str(sweep.root)])
    assert done == 0
    assert "nothing to run" in capsys.readouterr().out
    first, second = (paths.cell(folder.name) for folder in sweep.cells().values())
    write_json(first.outcome, read_json(first.outcome) | {"state": "failed", "reason": "exit code 1"})
    plan = read_json(paths.plan)
    assert main(["retry", str(sweep.root), "--workers", "1"]) == 0
    assert "1 cell in" in capsys.readouterr().out
    assert [read_json(cell.outcome)["attempt"] for cell in (first, second)] == [2, 1]
    assert read_json(paths.plan) == plan
    assert (sweep.root / "report.html").exists()

    assert main(["retry", str(sweep.root), second.root.name]) == 0
    assert "--fresh starts them over" in capsys.readouterr().out
    assert main(["retry", str(sweep.root), second.root.name, "--fresh"]) == 0
    assert read_json(second.outcome)["attempt"] == 2
    assert (second.attempt(1) / "steps.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--fresh"], "hydra.launcher.rerun=all"),
        (["--launcher", "cloud"], "--launcher = 'cloud' is not possible. Legal: one of local, slurm."),
        (["--launcher", "slurm"], "hydra/launcher=slurm slurm=PROFILE"),
        (["--no-wait"], "left out with --launcher local"),
    ],
)
def test_what_cannot_be_run_again_is_an_error(recorded, capsys, words, says):
    assert recorded("retry", *words) == 2
    assert says in capsys.readouterr().err


def test_a_configuration_that_is_not_the_cells_any_more_is_refused(recorded, capsys):
    config = recorded.paths.cell(recorded.ids[0]).config
    assert recorded("retry", "seed=0") == 2
    assert f"{config} = '<absent>' is not possible" in capsys.readouterr().err
    cell = read_json(recorded.paths.plan)["cells"][recorded.ids[1]]["cell"]
    write_json(config, {"cell": cell, "run": {}, "overrides": []})
    assert recorded("retry", "seed=0") == 2
    assert f"a cell with the id {recorded.ids[0]}" in capsys.readouterr().err


def test_a_cell_that_runs_is_not_run_again(recorded, capsys):
    recorded.begin(0, where=place(), pid=os.getpid())
    assert recorded("retry", "seed=0") == 0
    assert "1 running: left alone" in capsys.readouterr().out
    assert recorded("retry", "seed=0", "--fresh") == 2
    assert "stalefront cancel" in capsys.readouterr().err


def test_table_is_csv_with_a_row_a_cell(recorded, capsys):
    recorded.end(1, "failed")
    assert recorded("table") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert sorted(row["state"] for row in rows) == ["failed", "missing", "missing"]


def test_report_is_built_and_named(recorded, capsys):
    assert recorded("report") == 0
    assert capsys.readouterr().out.strip() == str(recorded.paths.root / "report.html")
    assert (recorded.paths.root / "report.html").exists()


def test_status_imports_neither_torch_nor_the_analysis(recorded):
    code = (
        "import sys; from stalefront.cli import main; code = main(['status', sys.argv[1]]); "
        "sys.exit(code or bool({'torch', 'pandas', 'hydra', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(recorded.paths.root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_reader_that_has_seen_enough_is_no_error(recorded):
    plan = read_json(recorded.paths.plan)
    entry = plan["cells"][recorded.ids[0]]
    plan["cells"] |= {f"{n:012x}": entry for n in range(3000)}
    recorded.paths.plan.write_text(json.dumps(plan))
    command = f"{sys.executable} -m stalefront.cli status {recorded.paths.root} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("mine: 3003 cells")
    assert done.stderr == ""


def drawn(columns, width):
    from rich.console import Console

    from stalefront.commands.columns import Columns

    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(Columns(columns))
    return out.getvalue().splitlines()


def test_a_narrow_terminal_leaves_out_columns_and_cuts_the_last_one():
    from stalefront.commands.columns import Column

    columns = [
        Column("cell", ["aa", "b"]),
        Column("step", ["1", "20"], "right"),
        Column("empty", ["", ""]),
        Column("host", ["node", ""], yields=2),
        Column("job", ["1", "2"], yields=1),
        Column("reason", ["x" * 40, "Grüße 漢字"]),
    ]
    assert drawn(columns, 70) == [
        "cell  step  host  job  reason",
        f"aa       1  node  1    {'x' * 40}",
        "b       20        2    Grüße 漢字",
    ]
    assert drawn(columns, 50)[1] == f"aa       1  1    {'x' * 32}…"
    assert drawn(columns, 40)[:2] == ["cell  step  reason", f"aa       1  {'x' * 27}…"]


def test_watching_shows_as_many_rows_as_the_terminal_has(recorded):
    from rich.console import Console

    from stalefront.commands.planned import Sweep
    from stalefront.commands.status import table

    out = io.StringIO()
    shown_table = table(Sweep.read(recorded.paths.root), shown(recorded), snapshot.STATES, height=5)
    Console(file=out, width=200).print(shown_table)
    assert out.getvalue().splitlines()[3] == "… and 2 more"


@pytest.mark.parametrize(("failed", "shown_failed"), [(0, 0), (2, 2), (6, 2), (10, 4)])
def test_old_failures_leave_room_for_what_runs(tmp_path, make_cell, failed, shown_failed):
    from stalefront.commands.status import first

    recorded = Recorded(tmp_path, [make_cell(seed=seed) for seed in range(10)])
    for seed in range(failed):
        recorded.end(seed, "failed")
    rows = first(shown(recorded).rows, 4)
    assert [row.state for row in rows] == ["failed"] * shown_failed + ["planned"] * (4 - shown_failed)
