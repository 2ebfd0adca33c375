"""Several ranks at one cell: they agree with one rank to rounding, stop and continue together, and fail together.

Run by torchrun, this file is one rank of `replay`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stalefront.app import run as command
from stalefront.build import build
from stalefront.cell import Cell, identity
from stalefront.choice import OptionError
from stalefront.claims import is_running, start_of
from stalefront.files import read_json, write_json
from stalefront.loop import Learner
from stalefront.paths import CellPaths
from stalefront.ranked import Place, ranks_of
from stalefront.ranks import Ranks
from stalefront.record import NAMES, WALL_CLOCK, read_rows
from stalefront.rollout import Samples
from stalefront.slots import make_slots
from stalefront.source import BatchSource, pack, unpack
from stalefront.worker import UNFINISHED, Order, work

WARM = {"model.warmup.steps": 200, "model.warmup.batch_size": 64, "optimizer.warmup_steps": 0}
REPLAYED = {
    "grpo": {"delay.S": 4, "loss.beta": 0.04, "optimizer.max_grad_norm": 0.5},
    "dr_grpo minibatches": {"loss": "dr_grpo", "delay.S": 4, "delay.minibatches": 2},
    "gspo micro-batches": {"loss": "gspo", "delay.S": 4, "delay.minibatches": 2, "optimizer.grad_accum": 2},
    "lag": {"delay": "lag", "loss": "reinforce", "correction": ["token_tis"], "optimizer": "sgd", "optimizer.lr": 0.1},
}
# Thresholds that the rounding of a sum cannot cross: gac projects at every step, the trigger fires at step 3.
REPLAYED["controllers and an average"] = {
    **{"delay.S": 4, "proximal": "ema", "controller": ["vcpo", "gac", "update_cap", "cosine_trigger"]},
    **{"controller.gac.low": -1.0, "controller.gac.high": 2.0, "controller.update_cap.cap": 0.05},
    **{"controller.cosine_trigger.when": "scheduled", "controller.cosine_trigger.at_steps": [3]},
    **{"optimizer": "sgd", "optimizer.lr": 0.1},
}
# Everything that a rollout may carry from row to row; two ranks also sample the first batch of this one.
CARRIED = "routes and kept ids"
REPLAYED[CARRIED] = {
    **{"model": "tiny_moe", "replay": "r3", "replay.probe_every": 3, "delay.S": 4, "optimizer.grad_accum": 2},
    **{"mismatch": ["router_noise", "top_p", "logp_noise"]},
    **{"mismatch.top_p.keep_mask": True, "mismatch.top_p.p": 0.9, "mismatch.router_noise.sigma": 0.5},
}
SHARES = {"mismatch_var_share", "lag_var_share"}
STEPS = 8
# A cell that takes a few seconds of learner steps, so that it is met at work.
LONG = {"steps": 60, "validation.every": 30, **WARM}
TWO = {"model.ranks": 2}


class Recorded(BatchSource):
    """Gives out batches that were sampled before; with an empty list, samples and keeps them."""

    def __init__(self, learner: Learner, kept: list[dict], replays: bool) -> None:
        vars(self).update(vars(learner.source))
        self.kept, self.replays, self.taken = kept, replays, 0

    def take(self, version_now):
        if not self.replays:
            self.kept.append(pack(super().take(version_now)))
        self.taken += 1
        return unpack(self.kept[self.taken - 1])


def train(cell: Cell, cache: Path, ranks: Ranks, kept: list[dict], *, replays: bool):
    """Flat parameters after all steps, and the records."""
    torch.manual_seed(cell.seed)
    learner = Learner(cell, build(cell, cache, ranks))
    learner.source = Recorded(learner, kept, replays)
    rows = [learner.advance()[1] for _ in range(cell.steps)]
    return torch.cat([p.detach().reshape(-1) for p in learner.parts.model.parameters()]), rows


def replay(folder: Path) -> None:
    """One rank: every cell of `folder` on its recorded batches."""
    torch.set_num_threads(1)
    ranks = Ranks.from_environment("cpu")
    for batches in sorted(folder.glob("*.pt")):
        cell = Cell.from_config(read_json(batches.with_suffix(".json")))
        kept = torch.load(batches)
        found = train(cell, folder.parent, ranks, kept, replays=True)
        torch.save(found, folder / f"{batches.stem}.rank{ranks.rank}")
        if batches.stem == CARRIED:
            sampled = Learner(cell, build(cell, folder.parent, ranks)).source.take(0)
            torch.save(pack(sampled), folder / f"sampled.rank{ranks.rank}")
    torch.distributed.destroy_process_group()


def torchrun(*arguments: str) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    meet = ("--rdzv-endpoint=localhost:0", "--local-addr=localhost")
    subprocess.run([*start, *meet, *arguments], check=True, timeout=120, env=environment)


def test_two_ranks_agree_with_one_on_recorded_batches(make_cell, tmp_path):
    folder = tmp_path / "replayed"
    folder.mkdir()
    one = {}
    for name, overrides in REPLAYED.items():
        kept: list[dict] = []
        one[name] = train(make_cell(steps=STEPS, **WARM, **overrides), tmp_path, Ranks.single(), kept, replays=False)
        again = train(make_cell(steps=STEPS, **WARM, **overrides), tmp_path, Ranks.single(), kept, replays=True)
        assert torch.equal(one[name][0], again[0])
        torch.save(kept, folder / f"{name}.pt")
        write_json(folder / f"{name}.json", make_cell(steps=STEPS, **WARM, **TWO, **overrides).as_dict())
    torchrun(__file__, str(folder))
    for name in REPLAYED:
        (first, rows), (second, same) = (torch.load(folder / f"{name}.rank{r}") for r in (0, 1))
        assert torch.equal(first, second)
        assert without_wall(rows) == without_wall(same)
        apart, moved = float((one[name][0] - first).norm()), rows[-1]["dist_from_start"]
        worst = float((one[name][0] - first).abs().max())
        print(f"{name}: {worst:.1e} apart at most, {apart:.1e} in all, of the {moved:.1e} that {STEPS} updates moved")
        assert worst < 1e-5
        assert moved > 1e-2
        for row, expected in zip(rows, one[name][1], strict=True):
            assert row.keys() == expected.keys()
            # Without lag and mismatch they are shares of what rounding leaves.
            nothing = SHARES if expected["logratio_var_nats2"] < 1e-10 else set()
            for column in row.keys() - WALL_CLOCK - nothing:
                known = expected[column]
                assert row[column] == (
                    known if known is None else pytest.approx(known, rel=1e-3, abs=1e-5, nan_ok=True)
                ), column
    agree_on_a_batch(torch.load(folder / f"{CARRIED}.pt")[0], folder)


def agree_on_a_batch(one: dict, folder: Path) -> None:
    """What two ranks sampled and scored is what one did: integers to the last bit, log-probs to rounding."""
    both = [torch.load(folder / f"sampled.rank{rank}") for rank in (0, 1)]
    assert int((one["support_BTK"] >= 0).sum()) > 0
    for name, expected in one.items():
        first, second = (found[name] for found in both)
        if expected is None or isinstance(expected, int):
            assert first == second == expected, name
            continue
        assert torch.equal(first, second), name
        exact = not expected.is_floating_point()
        assert torch.allclose(first, expected, rtol=0, atol=0 if exact else 1e-5), name


def without_wall(rows):
    return [json.dumps({k: v for k, v in row.items() if k not in WALL_CLOCK}) for row in rows]


def start(paths: CellPaths, cell: Cell, cache: Path, attempt: int = 1, every: int = 1000):
    """The process of a cell, as the pool starts it."""
    run = {"checkpoint_every": every, "cache_dir": str(cache), "keep_checkpoint": True}
    paths.root.mkdir(exist_ok=True)
    write_json(paths.config, {"cell_id": cell.cell_id, "cell": cell.as_dict(), "run": run})
    order = Order(paths.root, attempt, False, "test", cell.threads, None)
    process = multiprocessing.get_context("forkserver").Process(target=work, args=(order,))
    process.start()
    return process


def end(process, timeout=60):
    process.join(timeout)
    assert not process.is_alive(), "it hangs"
    return process.exitcode


def wait_for(get, timeout=60):
    limit = time.monotonic() + timeout
    while not (found := get()):
        assert time.monotonic() < limit, "it does not come true"
        time.sleep(0.02)
    return found


def step_of(paths):
    return paths.steps.read_bytes().count(b"\n") - 1 if paths.steps.exists() else -1


def ranks_at(root: Path) -> dict[int, tuple[int, int]]:
    """(pid, start) by rank of the rank processes that are at the cell in `root`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            place = re.search(rb"\0RANK=(\d+)\0", (folder / "environ").read_bytes())
            if b"stalefront.ranked" in words and str(root).encode() in words and place:
                pid = int(folder.name)
                found[int(place[1])] = (pid, start_of(pid))
    return found


@pytest.fixture(scope="module")
def long_cell(make_cell):
    return make_cell(**LONG, **TWO)


@pytest.fixture(scope="module")
def whole(long_cell, cache_dir, tmp_path_factory):
    """A cell of two ranks that nobody interrupts."""
    paths = CellPaths(tmp_path_factory.mktemp("whole"))
    code = end(start(paths, long_cell, cache_dir))
    assert code == 0, paths.log.read_text()
    return paths


def test_a_cell_of_two_ranks_is_recorded_like_any_other(whole, make_cell, completed):
    outcome, status = read_json(whole.outcome), read_json(whole.status)
    assert (outcome["state"], outcome["last_step"], outcome["error"]) == ("completed", LONG["steps"], "")
    assert status["state"] == "completed"
    assert not list(whole.root.glob("stop.*"))
    two = list(read_rows(whole.steps))
    one = completed(make_cell(**LONG))
    assert [row["step"] for row in two] == list(range(LONG["steps"] + 1))
    assert all(tuple(row)[: len(NAMES)] == NAMES for row in two)
    for column in ("reward_train", "reward_val", "tokens", "completion_length_mean", "theta_old_ratio_max"):
        assert [row[column] for row in two[:2]] == [row[column] for row in one[:2]], column
    assert [k for k in NAMES if two[1][k] is None] == [k for k in NAMES if one[1][k] is None]
    columns = ("reward_train", "tokens")
    apart = next((a["step"] for a, b in zip(one, two, strict=True) if any(a[c] != b[c] for c in columns)), None)
    print(f"sampled runs of one and of two ranks first differ at step {apart}")


def test_stopped_and_continued_is_as_if_never_stopped(whole, long_cell, cache_dir, tmp_path, numbers):
    paths = CellPaths(tmp_path / "stopped")
    # Of an earlier life of the directory, and for another attempt.
    paths.root.mkdir()
    paths.stop(2).touch()
    process = start(paths, long_cell, cache_dir)
    wait_for(lambda: step_of(paths) >= 10)
    os.kill(process.pid, signal.SIGTERM)
    assert end(process) == UNFINISHED
    outcome = read_json(paths.outcome)
    assert (outcome["state"], outcome["reason"]) == ("interrupted", "asked to stop"), outcome["error"]
    assert 10 <= outcome["last_step"] < LONG["steps"]
    assert not paths.stop(1).exists()
    paths.stop(2).unlink()
    paths.stop(1).touch()
    assert end(start(paths, long_cell, cache_dir, attempt=2)) == 0
    again = read_json(paths.outcome)
    assert (again["state"], again["resumed_from_step"]) == ("completed", outcome["last_step"])
    assert numbers(list(read_rows(paths.steps))) == numbers(list(read_rows(whole.steps)))


@pytest.mark.parametrize("victim", [1, pytest.param("its process", marks=pytest.mark.slow)])
def test_nobody_outlives_a_killed_rank_or_the_cells_process(victim, long_cell, cache_dir, tmp_path):
    paths = CellPaths(tmp_path / "killed")
    process = start(paths, long_cell, cache_dir)
    wait_for(lambda: step_of(paths) >= 3)
    ranks = ranks_at(paths.root)
    assert sorted(ranks) == [0, 1]
    os.kill(process.pid if victim == "its process" else ranks[victim][0], signal.SIGKILL)
    began = time.monotonic()
    code = end(process, timeout=20)
    print(f"killed {victim}: its process ended {time.monotonic() - began:.1f} s later")
    wait_for(lambda: not any(is_running(*rank) for rank in ranks.values()), timeout=10)
    if victim == "its process":
        assert code == -signal.SIGKILL
        return
    assert code == UNFINISHED
    outcome = read_json(paths.outcome)
    assert outcome["state"] == "failed"
    assert "another rank ended early" in outcome["reason"]
    assert "Signal 9 (SIGKILL)" in paths.log.read_text()


@pytest.mark.slow
def test_the_rank_that_fails_first_says_why(make_cell, cache_dir, tmp_path, monkeypatch):
    value = "1 / (1 - int(os.environ['RANK']))"
    reward = f"import os\n\ndef reward(completions, **_):\n    return [{value}] * len(completions)\n"
    (tmp_path / "of_the_first.py").write_text(reward)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}>", "answer": "{n}"}}\n' for n in range(100, 200)))
    task = {"path": str(tmp_path / "rows.jsonl"), "reward_function": "of_the_first:reward", "max_completion_length": 6}
    cell = make_cell(task="file", **{f"task.{key}": value for key, value in task.items()}, **TWO, **WARM)
    paths = CellPaths(tmp_path / "fails")
    assert end(start(paths, cell, cache_dir)) == UNFINISHED
    outcome = read_json(paths.outcome)
    assert (outcome["state"], outcome["reason"]) == ("failed", "ZeroDivisionError: division by zero")
    assert "of_the_first.py" in outcome["error"]


@pytest.mark.parametrize(
    ("overrides", "field", "part"),
    [
        ({"model.ranks": 0}, "model.ranks", "at least 1"),
        ({"model.ranks": 1.5}, "model.ranks", "type int"),
        ({"model.ranks": 3}, "model.ranks", "1, 2, 4, 8: ranks share"),
        ({"model.ranks": 4, "delay.minibatches": 2, "optimizer.grad_accum": 2}, "model.ranks", "1, 2: ranks share"),
        ({"model.ranks": 2, "optimizer.grad_accum": 16}, "model.ranks", "a multiple of 32"),
        ({"model.ranks": 2, "device": "cuda:1"}, "device", "cpu or cuda with model.ranks=2"),
        ({"model.ranks": 2, "engine": "trl"}, "model.ranks", "1 with engine=trl"),
    ],
)
def test_ranks_that_cannot_work_are_refused(overrides, field, part, make_cell):
    with pytest.raises(OptionError) as caught:
        make_cell(**overrides)
    assert caught.value.field == field
    assert part in str(caught.value)


def test_ranks_are_part_of_the_identity_and_one_is_neutral(make_cell):
    assert make_cell(**TWO).cell_id != make_cell().cell_id
    recorded = make_cell().as_dict()
    del recorded["model"]["ranks"]
    assert identity(recorded) == make_cell().cell_id


def test_a_cell_takes_cores_or_devices_for_every_rank(make_cell, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("stalefront.slots.cores", lambda: 8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    slots = make_slots(None, [], [])
    slots.take(make_cell(threads=3, **TWO))
    assert slots.free == 2
    assert slots.cost(make_cell(threads=8, **TWO)) == 8
    one, two, four = (make_cell(device="cuda", **{"model.ranks": n}) for n in (1, 2, 4))
    slots = make_slots(None, [0, 1, 3], [one, two])
    assert slots.take(two) == "0,1"
    assert (slots.fits(one), slots.fits(two)) == (True, False)
    slots.give_back(two, "0,1")
    assert slots.take(two) == "3,0"
    with pytest.raises(OptionError, match=r"model\.ranks = 4 .* at most 2"):
        make_slots(None, [0, 1], [one, four])


def test_an_allocation_of_several_nodes_starts_torchrun_on_each(monkeypatch, tmp_path):
    two = Place(2, "node1:29500").command(tmp_path, 3, 4)
    assert two[3:6] == ["--tied", "srun", "--overlap"]
    assert {"--nodes=2", "--ntasks-per-node=1", "--nproc-per-node=2", "--rdzv-endpoint=node1:29500"} <= set(two)
    assert two[-2:] == [str(tmp_path), "3"]
    with pytest.raises(OptionError, match=r"model\.ranks = 3 .* a multiple of 2"):
        Place(2, "node1:29500").command(tmp_path, 3, 3)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert "srun" not in Place.here().command(tmp_path, 1, 2)


def test_a_record_from_before_there_were_ranks_has_one(make_cell, tmp_path):
    cell = make_cell().as_dict()
    del cell["model"]["ranks"]
    write_json(tmp_path / "config.json", {"cell": cell})
    assert ranks_of(CellPaths(tmp_path)) == 1


@pytest.mark.parametrize(("count", "size"), [(8, 2), (7, 3), (1, 4)])
def test_spans_are_all_rows_in_order(count, size):
    rows = torch.arange(count)
    assert torch.equal(torch.cat([Ranks(rank, size).share(rows) for rank in range(size)]), rows)


def test_sequences_are_widened_as_if_a_longer_one_were_among_them():
    tokens = torch.tensor([[0, 5, 6]])
    samples = Samples(tokens, torch.tensor([[-1, 0, 1]]), tokens == 6, -0.5 * (tokens == 6), tokens[:, 0] > 0, [], [])
    wide = samples.widened(5, pad=9)
    assert wide.tokens_BT.tolist() == [[0, 5, 6, 9, 9]]
    assert wide.position_BT.tolist() == [[-1, 0, 1, 2, 3]]
    assert wide.mask_BT.tolist() == [[False, False, True, False, False]]
    assert wide.logp_behav_BT.tolist() == [[0, 0, -0.5, 0, 0]]
    assert torch.equal(samples.widened(3, pad=9).tokens_BT, tokens)


@pytest.mark.slow
def test_the_command_runs_both_and_stops_both(tmp_path):
    small = ("steps=8", "model.warmup.steps=10", "validation.num_samples=15", "hydra.launcher.report=false")
    arguments = ["-m", "sweep=null", *small, "model.ranks=1,2", f"hydra.sweep.dir={tmp_path}"]
    assert command(arguments) == 0
    plan = read_json(tmp_path / "plan.json")["cells"]
    outcomes = {
        cell["cell"]["model"]["ranks"]: read_json(tmp_path / f"cells/{i}/outcome.json") for i, cell in plan.items()
    }
    assert {ranks: outcome["state"] for ranks, outcome in outcomes.items()} == {1: "completed", 2: "completed"}
    rows = [next(read_rows(tmp_path / f"cells/{i}/steps.jsonl")) for i in plan]
    assert rows[0]["reward_val_n"] == rows[1]["reward_val_n"] == 15
    assert len(list((tmp_path / "cache").glob("warmup-*.pt"))) == 1


if __name__ == "__main__":
    replay(Path(sys.argv[1]))
