"""The command `stalefront` on a sweep whose cells are jobs of a real queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from stalefront.app import run
from stalefront.cli import main
from stalefront.files import read_json
from stalefront.slurm import settle

pytestmark = pytest.mark.slurm

# Long enough to be met at work; a cell that is run again goes on from its checkpoint.
LONG = (
    *("steps=400", "model.warmup.steps=10", "model.warmup.batch_size=16", "validation.num_samples=16"),
    *("task.num_prompts=2", "task.num_generations=4", "run.checkpoint_every=10"),
)
# Two jobs of two cells side by side, of which one job runs at a time.
PACKED = ("hydra/launcher=slurm", "slurm=cpu", "slurm.time=10", "hydra.launcher.poll_s=1")
PACKED += ("hydra.launcher.cells_per_job=2", "hydra.launcher.width=2", "hydra.launcher.throttle=1")


class Submitted:
    """A sweep of four cells in the queue, and the command on it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys
        words = ["-m", "sweep=null", *LONG, *PACKED, "hydra.launcher.wait=false", f"hydra.sweep.dir={root}"]
        assert run([*words, "seed=0,1,2,3"]) == 0
        self.printed()
        record = next(root.glob("jobs/*/batch.json"))
        stored = read_json(record)
        self.job, self.report_job, (self.first, self.second) = stored["job"], stored["report_job"], stored["cells"]

    def __call__(self, command: str, *words: str, code: int = 0) -> str:
        found = main([command, str(self.root), *words])
        out, err = self.printed()
        assert found == code, out + err
        return out + err

    def printed(self) -> tuple[str, str]:
        captured = self.capsys.readouterr()
        return captured.out, captured.err

    def rows(self) -> dict[str, list[str]]:
        """Words of each cell's row."""
        lines = [line.split() for line in self("status").splitlines()]
        return {words[0]: words for words in lines if words and words[0] in (*self.first, *self.second)}

    def states(self, cells: list[str]) -> list[str]:
        rows = self.rows()
        return [rows[cell][1] for cell in cells]

    def outcome(self, cell: str) -> dict[str, object]:
        found: dict[str, object] = read_json(self.root / "cells" / cell / "outcome.json")
        return found

    def checkpoints(self, cells: list[str]) -> bool:
        return all((self.root / "cells" / cell / "checkpoint" / "state.pt").exists() for cell in cells)


@pytest.fixture
def submitted(cluster, tmp_path, capsys, monkeypatch):
    # The files of this cluster are on this machine's own disk.
    monkeypatch.setattr(settle, "GRACE_S", 0.5)
    cluster.clear()
    yield Submitted(tmp_path / "sweep", capsys)
    cluster.clear()


def test_a_sweep_in_the_queue_is_looked_at_ended_and_healed(submitted, wait_until):
    rows = submitted.rows()
    assert {words[1] for words in rows.values()} <= {"submitted", "running"}
    assert f"{submitted.job}_1" in rows[submitted.second[0]]

    wait_until(lambda: submitted.checkpoints(submitted.first), 90)
    out = submitted("status")
    assert "4 cells: 2 running, 2 submitted" in out
    assert "Slurm: 1 job runs, 1 pending (JobArrayTaskLimit)" in out
    assert f"job {submitted.report_job} will write the report" in out
    cell, other = submitted.first
    assert "--- attempt 1, pid " in submitted("logs", cell)
    assert f"cell {cell}, attempt 1, begins" in submitted("logs", cell, "--job")
    assert "It is submitted: JobArrayTaskLimit" in submitted("logs", submitted.second[0], code=2)
    assert "2 running, 2 submitted: left alone" in submitted("retry")

    refused = submitted("cancel", cell, code=2)
    assert f"job {submitted.job}_0 also holds {other}" in refused
    assert submitted.states(submitted.first) == ["running", "running"]
    out = submitted("cancel", cell, "--whole-job")
    assert f"cancelled 1 job: {submitted.job}_0" in out
    assert "of their cells: 2 failed" in out
    ended = submitted.outcome(cell)
    assert (ended["state"], ended["attempt"], ended["job"]) == ("failed", 1, f"{submitted.job}_0")
    assert f"Slurm job {submitted.job}_0: CANCELLED" in str(ended["reason"])
    assert set(submitted.states(submitted.second)) <= {"submitted", "running"}

    out = submitted("cancel")
    assert f"cancelled 1 job: {submitted.job}_1" in out
    assert f"cancelled job {submitted.report_job}, which would have written the report" in out
    assert submitted.states(submitted.second) == ["failed", "failed"]
    assert "nothing to cancel" in submitted("cancel")
    assert read_json(next(submitted.root.glob("jobs/*/batch.json")))["closed"]

    submitted("retry", cell, "--no-wait")
    assert submitted.states([cell, other])[1] == "failed"
    wait_until(lambda: submitted.rows()[cell][1] == "completed", 90)
    healed = submitted.outcome(cell)
    assert (healed["attempt"], healed["job"] != f"{submitted.job}_0") == (2, True)
    assert int(str(healed["resumed_from_step"])) >= 10
