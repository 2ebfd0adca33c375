"""A cell killed at any moment and started again ends with the very records of an uninterrupted run."""

import copy
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch

from stalefront import record
from stalefront.cell import Cell
from stalefront.choice import OptionError
from stalefront.files import read_json, write_json
from stalefront.paths import CellPaths
from stalefront.record import read_rows
from stalefront.run import run_cell

STEPS = 40


@pytest.fixture(scope="module")
def forks():
    """Processes that are ready to compute; importing anew for every kill would take most of the time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama", "stalefront.run"])
    return context


@pytest.fixture
def cell(make_cell):
    return make_cell(
        delay="lag", steps=STEPS, loss="grpo", **{"delay.lag_updates": 3, "model.warmup.steps": 20, "loss.beta": 0.04}
    )


@pytest.fixture
def reference(cell, run_in, tmp_path, numbers):
    return numbers(run_in(tmp_path / "whole", cell).rows)


def prepared(root, cell, cache_dir, every):
    options = {"checkpoint_every": every, "cache_dir": str(cache_dir)}
    write_json(root / "config.json", {"cell_id": cell.cell_id, "cell": cell.as_dict(), "run": options})
    return CellPaths(root)


def start(forks, root, attempt):
    process = forks.Process(target=run_cell, args=(root,), kwargs={"attempt": attempt})
    process.start()
    return process


def wait_for_step(paths, step, process):
    while process.is_alive() and sum(1 for _ in read_rows(paths.steps)) <= step:
        time.sleep(0.005)


@pytest.mark.parametrize("every", [3, "0.0001m"])
def test_killed_again_and_again(every, cell, reference, tmp_path, cache_dir, forks, run_in, numbers):
    paths = prepared(tmp_path / "killed", cell, cache_dir, every)
    chance = random.Random(0)
    attempt = 0
    for aim in (2, 9, 17, 25, 33):
        attempt += 1
        process = start(forks, paths.root, attempt)
        wait_for_step(paths, aim, process)
        # Anywhere inside the next step or two: in a forward, between record and checkpoint, in the middle of a write.
        time.sleep(chance.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    ran = run_in(paths.root, cell, checkpoint_every=every, attempt=attempt + 1)
    assert numbers(ran.rows) == reference
    assert [row["step"] for row in ran.rows] == list(range(STEPS + 1))
    assert ran.outcome["resumed_from_step"] > 25
    assert ran.outcome["state"] == "completed"


def test_killed_in_the_middle_of_writing(cell, reference, tmp_path, cache_dir, forks, run_in, numbers):
    paths = prepared(tmp_path / "torn", cell, cache_dir, 5)
    process = start(forks, paths.root, 1)
    wait_for_step(paths, 12, process)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with paths.steps.open("a") as out:
        out.write('{"step":14,"batch":14,"los')
    paths.checkpoint.with_suffix(".tmp").write_bytes(b"half a checkpoint")
    ran = run_in(paths.root, cell, checkpoint_every=5, attempt=2)
    assert numbers(ran.rows) == reference
    assert ran.outcome["resumed_from_step"] == 10
    spared = paths.attempt(1) / "steps.jsonl"
    assert [r["step"] for r in read_rows(spared)][:2] == [11, 12]
    assert spared.read_text().endswith('"los')


def test_sigterm_checkpoints_and_says_so(cell, reference, tmp_path, run_in, numbers, monkeypatch):
    append = record.StepWriter.append

    def and_signal(writer, row):
        append(writer, row)
        if row["step"] == 3:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(record.StepWriter, "append", and_signal)
        stopped = run_in(tmp_path / "term", cell, checkpoint_every=1000)
    assert stopped.outcome["state"] == "interrupted"
    # The ranks agree on a stop before a step is recorded, so the request came in time for the next one.
    assert stopped.outcome["last_step"] == 4
    ran = run_in(stopped.paths.root, cell, checkpoint_every=1000, attempt=2)
    assert ran.outcome["resumed_from_step"] == 4
    assert numbers(ran.rows) == reference
    assert not ran.paths.attempt(1).exists()


# Moves weights whatever the rewards are.
DECAY = {"optimizer.weight_decay": 0.5, "optimizer.warmup_steps": 0, "optimizer.lr": 0.01}
MOE = {"model": "tiny_moe", **DECAY}
FLIPS = {"mismatch": ["expert_flips", "logit_noise"]}


@pytest.mark.parametrize(
    "overrides",
    [
        {"delay": "none"},
        {"delay.S": 4, "delay.minibatches": 2},
        {"delay": "lag", "delay.via": "weights", "delay.lag_updates": 3},
        {"loss": "reinforce", "correction": ["token_tis"], "optimizer": "nsgd"},
        {"delay": "lag", "correction": ["estr"]},
        {"controller": ["vcpo", "gac", "update_cap", "cosine_trigger", "optimizer_reset"], "proximal": "ema"},
        {**MOE, **FLIPS, "replay": "r3", "delay.S": 3, "replay.probe_every": 2},
        {**MOE, **FLIPS, "replay": "r2", "delay": "lag", "delay.lag_updates": 2, "proximal": "ema"},
        {**MOE, "model.deterministic_topk": True, "mismatch": ["retokenise", "router_noise"]},
        {**DECAY, "mismatch": ["stale_kv", "bf16_weights"], "delay.S": 2},
        {**DECAY, "mismatch": ["top_p"], "mismatch.top_p.keep_mask": True, "delay": "lag"},
        {**DECAY, "mismatch": ["logit_noise"], "mismatch.target_kl": 1e-3},
        {**DECAY, "mismatch": ["fp16"], "model.dtype": "bfloat16", "model.fp32_head": "trainer"},
    ],
)
def test_every_kind_of_state_is_in_the_checkpoint(overrides, make_cell, run_in, tmp_path, numbers):
    cell = make_cell(steps=12, **{"model.warmup.steps": 20}, **overrides)
    whole = run_in(tmp_path / "whole", cell)
    run_in(tmp_path / "parts", cell, checkpoint_every=5)
    paths = CellPaths(tmp_path / "parts")
    lines = paths.steps.read_text().splitlines(keepends=True)
    paths.steps.write_text("".join(lines[:12]))
    ran = run_in(paths.root, cell, checkpoint_every=5, attempt=2)
    assert ran.outcome["resumed_from_step"] == 10
    assert numbers(ran.rows) == numbers(whole.rows)


def without(recorded, *paths):
    """A recorded mapping as it was before the fields `paths` were there."""
    plain = copy.deepcopy(recorded)
    for path in paths:
        *parents, leaf = path.split(".")
        node = plain
        for name in parents:
            node = node[name]
        del node[leaf]
    return plain


def test_a_cell_recorded_before_mismatch_and_replay_goes_on(make_cell, run_in, tmp_path, numbers):
    lag = {"delay": "lag", "delay.lag_updates": 2, "steps": 12, "loss": "reinforce", "correction": ["token_tis"]}
    cell = make_cell(**lag, **{"model.warmup.steps": 20})
    whole = run_in(tmp_path, cell, checkpoint_every=5)
    younger = ("mismatch", "target_kl", "replay", "model.fp32_head", "model.deterministic_topk")
    recorded = without(cell.as_dict(), *younger, "model.ranks", "proximal", "reduction", "controller")
    paths = whole.paths
    write_json(paths.config, read_json(paths.config) | {"cell": recorded})
    assert Cell.from_config(recorded) == cell
    state = torch.load(paths.checkpoint, weights_only=True)
    columns = ("tail_mass_BT", "own_routes_LBTK", "route_hash_B", "support_BTK", "misaligned_B")
    state = without(state, "mismatch_factor", *(f"batch.{name}" for name in columns))
    state["source"]["queue"] = [without(batch, *columns) for batch in state["source"]["queue"]]
    torch.save(state, paths.checkpoint)
    paths.steps.write_text("".join(paths.steps.read_text().splitlines(keepends=True)[:12]))
    paths.outcome.unlink()
    outcome = run_cell(paths.root, attempt=2)
    assert (outcome["state"], outcome["resumed_from_step"]) == ("completed", 10), outcome["error"]
    # Batches that were waiting have no mass of the tail; all else is as if it had never stopped.
    rows = [[row | {"tail_expected_frac": None} for row in found] for found in (whole.rows, read_rows(paths.steps))]
    assert numbers(rows[0]) == numbers(rows[1])


def test_a_record_that_lacks_what_was_always_there_is_refused(make_cell):
    recorded = make_cell().as_dict()
    for path in ("model.dtype", "loss.beta", "delay.S"):
        with pytest.raises(OptionError) as caught:
            Cell.from_config(without(recorded, path))
        assert caught.value.field == path


def half_way(make_cell, run_in, root):
    """A cell of 12 steps with a checkpoint at 10, and its records."""
    cell = make_cell(steps=12, **{"model.warmup.steps": 20})
    return cell, run_in(root, cell, checkpoint_every=5)


@pytest.mark.parametrize("damage", ["rows gone", "file gone", "checkpoint torn", "checkpoint empty"])
def test_a_checkpoint_that_cannot_be_continued_is_set_aside(damage, make_cell, run_in, tmp_path, numbers):
    cell, whole = half_way(make_cell, run_in, tmp_path)
    paths = whole.paths
    if damage == "rows gone":
        paths.steps.write_text("".join(paths.steps.read_text().splitlines(keepends=True)[:3]))
    elif damage == "file gone":
        paths.steps.unlink()
    else:
        whole_file = paths.checkpoint.read_bytes()
        paths.checkpoint.write_bytes(whole_file[: len(whole_file) // 2] if damage == "checkpoint torn" else b"")
    again = run_in(tmp_path, cell, checkpoint_every=5, attempt=2)
    assert again.outcome["state"] == "completed"
    assert again.outcome["resumed_from_step"] == 0
    assert again.outcome["warnings"][0].startswith("started over: ")
    assert (paths.attempt(1) / "state.pt").exists()
    assert numbers(again.rows) == numbers(whole.rows)


def test_killed_between_the_last_checkpoint_and_the_outcome(make_cell, run_in, tmp_path, numbers):
    cell = make_cell(steps=10, **{"model.warmup.steps": 20})
    whole = run_in(tmp_path, cell, checkpoint_every=5)
    whole.paths.outcome.unlink()
    again = run_in(tmp_path, cell, checkpoint_every=5, attempt=2)
    for key in ("state", "last_step", "steps"):
        assert again.outcome[key] == whole.outcome[key]
    assert again.outcome["resumed_from_step"] == 10
    status = read_json(again.paths.status)
    assert (status["step"], status["reward_val"]) == (10, whole.rows[-1]["reward_val"])
    assert numbers(again.rows) == numbers(whole.rows)
