"""Identity: the same cell has the same id, and only what changes numbers counts."""

import copy
import json
from pathlib import Path

import pytest

from stalefront import cell as cell_module
from stalefront.cell import Cell, identity, stored_identity
from stalefront.choice import OptionError

# Ids of recorded cells must stay what they are: changing one orphans every sweep directory that holds it.
PINNED = {
    "tiny": ({}, "92eaae8c7713"),
    "lag": ({"delay": "lag", "loss": "reinforce", "correction": ["token_tis"]}, "7884a38f1968"),
    "cispo": ({"loss": "cispo", "optimizer": "sgd", "seed": 3}, "2b2b291f58ba"),
}

CONF = Path(__file__).parents[1] / "conf"


@pytest.mark.parametrize("name", PINNED)
def test_known_ids_stay(name, make_cell):
    overrides, expected = PINNED[name]
    assert make_cell(**overrides).cell_id == expected


def test_recorded_form_gives_the_same_cell(make_cell):
    cell = make_cell(delay="lag", loss="reinforce", correction=["token_tis"])
    recorded = json.loads(json.dumps(cell.as_dict()))
    again = Cell.from_config(recorded)
    assert again == cell
    assert again.cell_id == cell.cell_id


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 1), ("steps", 9), ("threads", 2), ("optimizer.lr", 1e-3), ("delay.S", 2), ("loss.beta", 0.04),
     ("task.temperature", 0.9), ("model.dtype", "bfloat16"), ("validation.every", 2)],
)  # fmt: skip
def test_what_changes_numbers_changes_the_id(key, value, make_cell):
    assert make_cell(**{key: value}).cell_id != make_cell().cell_id


def test_whole_and_float_of_one_value_are_one_cell(make_cell):
    assert make_cell(**{"optimizer.lr": 1}).cell_id == make_cell(**{"optimizer.lr": 1.0}).cell_id


def test_a_field_at_its_neutral_value_is_left_out(make_cell):
    plain = make_cell().as_dict()
    later = copy.deepcopy(plain)
    later["loss"]["temper"] = 0.0
    neutral = {"loss.temper": 0.0}
    assert identity(later, neutral) == identity(plain, neutral)
    later["loss"]["temper"] = 0.1
    assert identity(later, neutral) != identity(plain, neutral)


def test_neutral_paths_exist(make_cell, conf_choice):
    known = make_cell().as_dict()
    for path in cell_module.NEUTRAL:
        group, _, leaf = path.partition(".")
        assert group in known
        names = [file.stem for file in (CONF / group).glob("*.yaml") if file.stem != "none"]
        assert not leaf or any(leaf in conf_choice(group, name) for name in names)


def test_S_is_the_number_of_versions_an_age_can_take(make_cell):
    assert make_cell(delay="none").S == 1
    assert make_cell(**{"delay.S": 16}).S == 16
    assert make_cell(delay="lag", **{"delay.lag_updates": 15}).S == 16


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:x"}, "device"),
        ({"device": "cuda:"}, "device"),
        ({"device": "cuda:-1"}, "device"),
        ({"device": "cpu\n"}, "device"),
        ({"threads": 0}, "threads"),
        ({"delay.S": -4}, "delay.S"),
        ({"delay.S": 4, "delay.minibatches": 3}, "delay.minibatches"),
        ({"delay.S": 3, "delay.minibatches": 3}, "delay.minibatches"),
        ({"optimizer.lr": -1e-3}, "optimizer.lr"),
        ({"optimizer.lr": float("nan")}, "optimizer.lr"),
        ({"optimizer.betas": None}, "optimizer.betas"),
        ({"optimizer": "sgd", "optimizer.betas": [0.9, 0.95]}, "optimizer.betas"),
        ({"optimizer": "sgd", "optimizer.eps": 1e-8}, "optimizer.eps"),
        ({"optimizer": "nsgd", "optimizer.weight_decay": 0.1}, "optimizer.weight_decay"),
        ({"optimizer": "nsgd", "optimizer.max_grad_norm": 1.0}, "optimizer.max_grad_norm"),
        ({"optimizer.grad_accum": 7}, "optimizer.grad_accum"),
        ({"loss.epsilon": -0.1}, "loss.epsilon"),
        ({"loss.delta": 1.1}, "loss.delta"),
        ({"loss": "cispo", "loss.epsilon_high": 0}, "loss.epsilon_high"),
        ({"loss.scale_rewards": "std"}, "loss.scale_rewards"),
        ({"task.num_generations": 1}, "task.num_generations"),
        ({"task.temperature": 0}, "task.temperature"),
        ({"model.config": None}, "model.checkpoint"),
        ({"model.alphabet": "00"}, "model.alphabet"),
        ({"model.warmup.noise": 2}, "model.warmup.noise"),
        ({"correction": ["token_tis"]}, "correction.token_tis.anchor"),
        ({"loss": "reinforce", "correction": ["token_tis"], "correction.token_tis.anchor": "old/mu"},
         "correction.token_tis.anchor"),
        ({"loss": "reinforce", "correction": ["token_tis"], "correction.token_tis.cap": 0.5},
         "correction.token_tis.cap"),
        ({"validation.every": 0}, "validation.every"),
    ],
)  # fmt: skip
def test_impossible_cells_are_refused_by_the_field_at_fault(overrides, field, make_cell):
    with pytest.raises(OptionError) as caught:
        make_cell(**overrides)
    assert caught.value.field == field


def test_the_largest_seed_and_an_index_are_taken(make_cell):
    cell = make_cell(seed=2**32 - 1, device="cuda:1")
    assert (cell.seed, cell.device) == (2**32 - 1, "cuda:1")


def test_a_recorded_list_with_a_repeat_is_refused(make_cell):
    recorded = make_cell(loss="reinforce", correction=["token_tis"]).as_dict()
    recorded["correction"] *= 2
    with pytest.raises(OptionError, match="names each choice once") as caught:
        Cell.from_config(recorded)
    assert caught.value.field == "correction"


def test_identity_is_the_recorded_form_where_no_file_is_named(make_cell):
    cell = make_cell(delay="lag", loss="reinforce", correction=["token_tis"])
    assert cell.identity() == cell.as_dict()
    assert stored_identity(json.loads(json.dumps(cell.as_dict())), cell) == cell.cell_id


def test_a_stored_cell_keeps_its_id_wherever_its_file_lies_and_no_edit_passes(make_cell, tmp_path):
    text = "".join(json.dumps({"prompt": f"p{n}", "answer": n}) + "\n" for n in range(10))
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(text)
    fields = {"task.num_prompts": 2}
    one, other = (make_cell(task="file", **fields, **{"task.path": str(tmp_path / n)}) for n in ("a.jsonl", "b.jsonl"))
    stored = json.loads(json.dumps(one.as_dict()))
    (tmp_path / "a.jsonl").unlink()
    assert stored_identity(stored, other) == other.cell_id == one.cell_id
    for edit in ({"num_prompts": 3}, {"extra": 1}, {"choice": "sort5"}):
        assert stored_identity(stored | {"task": stored["task"] | edit}, other) != one.cell_id
    assert stored_identity(stored | {"seed": 1}, other) != one.cell_id


def test_an_absent_checkpoint_is_refused(make_config, tmp_path):
    config = make_config(model="pretrained", **{"model.checkpoint": str(tmp_path / "nothing")})
    with pytest.raises(OptionError, match="Check the path"):
        Cell.from_config(config)


def test_targets_outside_the_package_are_refused(make_config):
    config = make_config()
    config["loss"]["_target_"] = "os.system"
    with pytest.raises(OptionError, match=r"a class inside stalefront\.loss"):
        Cell.from_config(config)
