"""Before a cell runs: what a launch refuses, and that the data is what the cell was planned with."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from stalefront import build as build_module
from stalefront.build import build, check_identity
from stalefront.cell import Cell
from stalefront.choice import OptionError
from stalefront.evaluate import validate
from stalefront.preflight import is_plain, preflight

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}<assistant>"
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789<>;_ "
WIDER = {"model.alphabet": ALPHABET, "model.config.vocab_size": 48}


def rows(count, **columns):
    return [{"prompt": f"sort {n}", "answer": str(n), **columns} for n in range(count)]


@pytest.fixture
def write(tmp_path):
    """`write(rows, name)`: a JSON-lines file."""

    def run(content, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
        return path

    return run


@pytest.fixture
def file_cell(make_cell):
    """`file_cell(path, **overrides)`: the tiny model on a file."""

    def make(path, **overrides):
        options = {**WIDER, "task.path": str(path), "task.num_prompts": 2, "task.max_completion_length": 8}
        return make_cell(task="file", **(options | overrides))

    return make


@pytest.fixture(scope="module")
def folder(make_cell, tmp_path_factory):
    """A checkpoint folder: a tiny model whose tokenizer has no chat template."""
    options = make_cell(**WIDER).model
    tokenizer = options.tokenizer()
    path = tmp_path_factory.mktemp("checkpoint")
    options.build(tokenizer, seed=7).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("overrides", "field", "reason"),
    [
        ({"model.config.num_attention_heads": 5}, "model.config", "not a multiple of the number of attention heads"),
        ({"model.config.num_key_value_heads": 3}, "model.config", "no multiple of num_key_value_heads=3"),
        ({"model.config.hidden_size": -32}, "model.config", "gave"),
        ({"model.config.model_type": "lama"}, "model.config", "lama"),
        ({"model.config.max_position_embeddings": 12}, "model.config.max_position_embeddings", "at least 13"),
        ({"task.max_completion_length": 58}, "model.config.max_position_embeddings", "at least 65"),
        ({"model.alphabet": "012345678_>"}, "model.alphabet", "Missing: '9'"),
    ],
)
def test_a_model_that_cannot_work_is_refused(overrides, field, reason, make_cell):
    with pytest.raises(OptionError, match=reason) as caught:
        preflight([make_cell(), make_cell(**overrides)])
    assert caught.value.field == field


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"model.config.num_key_value_heads": 2, "model.config.hidden_size": 64},
        {"model.config.max_position_embeddings": 13},
        {"task.max_completion_length": 57},
    ],
)
def test_arithmetic_and_transformers_agree_on_plain_models(overrides, make_cell, monkeypatch):
    cell = make_cell(**overrides)
    assert is_plain(cell.model.config)
    preflight([cell])
    monkeypatch.setattr("stalefront.preflight.is_plain", lambda _: False)
    preflight([cell])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 5},
        {"num_key_value_heads": 3},
        {"hidden_size": 36},
        {"hidden_size": 0},
        {"num_hidden_layers": 2.0},
        {"rope_theta": 1e4},
        {"model_type": "qwen2"},
        {"tie_word_embeddings": None},
    ],
)
def test_what_is_not_plain_is_left_to_transformers(changes, conf_choice):
    assert not is_plain(conf_choice("model", "tiny")["config"] | changes)


def test_the_default_cell_is_judged_without_torch(make_config):
    code = (
        "import sys, json; from stalefront.cell import Cell; from stalefront.preflight import preflight\n"
        "preflight([Cell.from_config(json.loads(sys.argv[1]))]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(make_config())], check=True)


@pytest.mark.parametrize(
    ("content", "overrides", "field", "reason"),
    [
        ([*rows(9), {"prompt": "Sort É", "answer": "1"}], {}, "model.alphabet", "Missing: 'SÉ'"),
        ([{"prompt": "x", "answer": "A"}, *rows(9)], {}, "model.alphabet", "Missing: 'A'"),
        (rows(10), {"task.stop": "\n"}, "task.stop", "would never end one"),
        (rows(10), {"task.stop": "ab"}, "task.stop", "would never end one"),
        (rows(10), {"task.format": "chat"}, "task.format", "model.config has none"),
        ([*rows(9), {"prompt": "a" * 57, "answer": "1"}], {}, "model.config.max_position_embeddings", "at least 65"),
        ([{"prompt": "x", "answer": "1" * 63}, *rows(9)], {}, "model.config.max_position_embeddings", "at least 65"),
    ],
)
def test_a_file_that_does_not_fit_the_model_is_refused(content, overrides, field, reason, write, file_cell):
    with pytest.raises(OptionError, match=reason) as caught:
        preflight([file_cell(write(content), **overrides)])
    assert caught.value.field == field


def test_answers_that_need_not_be_said_may_hold_any_character(write, file_cell):
    path = write([{"prompt": "x", "answer": "#### 1"}, *rows(9)])
    preflight([file_cell(path, **{"model.warmup": None, "task.reward_function": "last_number", "task.stop": ";"})])


@pytest.mark.parametrize(
    ("template", "overrides", "field", "reason"),
    [
        (None, {}, None, ""),
        (TEMPLATE, {"task.format": "chat"}, None, ""),
        (None, {"task.format": "chat"}, "task.format", "has none"),
        ("{{ raise_exception('no system') }}", {"task.format": "chat"}, "task.format", "no system"),
        (None, {"task.stop": "\n"}, "task.stop", "would never end one"),
        (None, {"task.max_completion_length": 60}, "task.max_completion_length", "at most 58: the model has 64"),
    ],
)
def test_a_checkpoint_is_asked_before_anything_runs(
    template, overrides, field, reason, folder, tmp_path, write, make_cell
):
    mine = shutil.copytree(folder, tmp_path / "model")
    if template:
        (mine / "chat_template.jinja").write_text(template)
    options = {"model.checkpoint": str(mine), "task.path": str(write(rows(10))), "task.num_prompts": 2}
    cell = make_cell(model="pretrained", task="file", **(options | {"task.max_completion_length": 8} | overrides))
    if field is None:
        preflight([cell])
        return
    with pytest.raises(OptionError, match=reason) as caught:
        preflight([cell])
    assert caught.value.field == field


def test_a_checkpoint_with_a_broken_configuration_is_refused(folder, tmp_path, make_cell):
    mine = shutil.copytree(folder, tmp_path / "model")
    (mine / "config.json").write_text("{")
    with pytest.raises(OptionError, match=r"model\.checkpoint"):
        preflight([make_cell(model="pretrained", **{"model.checkpoint": str(mine)})])


@pytest.mark.parametrize("gguf_file", [None, "model.gguf"])
def test_a_hub_look_up_names_both_readings_and_the_file_asked_for(gguf_file, make_cell, monkeypatch):
    from transformers import AutoConfig

    asked = []

    def look_up(checkpoint, **source):
        asked.append((checkpoint, source))
        raise OSError("cannot connect\nsee the manual")

    monkeypatch.setattr(AutoConfig, "from_pretrained", look_up)
    cell = make_cell(model="pretrained", **{"model.checkpoint": "data/nope", "model.gguf_file": gguf_file})
    with pytest.raises(OptionError, match=r"no folder data/nope here, and .* hub gave: cannot connect$"):
        preflight([cell, cell])
    assert asked == [("data/nope", {"gguf_file": gguf_file} if gguf_file else {})]


def test_an_edited_file_is_another_cell_and_the_planned_one_does_not_run_on_it(write, file_cell):
    path = write(rows(10))
    planned = file_cell(path)
    recorded = json.loads(json.dumps(planned.as_dict()))
    check_identity(Cell.from_config(recorded), planned.cell_id)
    write(rows(11))
    again = Cell.from_config(recorded)
    assert again.cell_id != planned.cell_id
    with pytest.raises(OptionError, match=r"rows\.jsonl or the record was edited") as caught:
        check_identity(again, planned.cell_id)
    assert caught.value.field == "task.path"


def test_a_record_that_was_edited_does_not_run(make_cell):
    with pytest.raises(OptionError, match="cell_id"):
        check_identity(make_cell(seed=1), make_cell().cell_id)


def test_a_validation_does_not_depend_on_how_it_is_cut(make_cell, tmp_path, monkeypatch):
    cell = make_cell(**{"validation.num_samples": 128, "model.warmup.steps": 60})
    found = []
    for size in (128, 32, 50):
        monkeypatch.setattr(build_module, "VALIDATION_CHUNK", size)
        parts = build(cell, tmp_path)
        texts: list[str] = []
        sample = parts.sampler.sample

        def listen(*args, sample=sample, texts=texts, **options):
            samples = sample(*args, **options)
            texts.extend(samples.texts)
            return samples

        monkeypatch.setattr(parts.sampler, "sample", listen)
        found.append((validate(cell, parts, 4), texts))
        assert len(parts.validation) == -(-128 // size)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0][1])) > 10


@pytest.mark.parametrize(
    ("overrides", "field", "part"),
    [
        ({"replay": "r3"}, "replay", "A Llama has no routers"),
        ({"mismatch": ["router_noise"]}, "mismatch", "model=tiny_moe"),
        ({"model.deterministic_topk": True}, "model.deterministic_topk", "A Llama has no routers"),
        ({"mismatch": ["int4"], "mismatch.int4.group_size": 7}, "mismatch.int4.group_size", "a divisor of 32"),
        (
            {"model": "tiny_moe", "replay": "r3", "model.config": {"model_type": "phimoe", "vocab_size": 16}},
            "replay",
            "phimoe",
        ),
    ],
)
def test_what_a_model_cannot_do_is_said_before_anything_runs(overrides, field, part, make_cell):
    with pytest.raises(OptionError, match=re.escape(part)) as caught:
        preflight([make_cell(), make_cell(**overrides)])
    assert caught.value.field == field


def test_models_with_routers_are_taken(make_cell):
    preflight(
        [make_cell(model="tiny_moe", replay="r3", mismatch=["expert_flips"], **{"model.deterministic_topk": True})]
    )
