"""Where weights come from: a configuration, a checkpoint folder; and the same learner steps from either."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.model import clean_copy
from stalefront.policy import forward

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789<>;_ "
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WIDER = {"model.alphabet": ALPHABET, "model.config.vocab_size": 48, "model.config.max_position_embeddings": 128}


def logits(model):
    tokens = torch.arange(2, 14).view(2, 6)
    with torch.no_grad():
        return forward(model, tokens, torch.arange(6).expand(2, -1)).logits


@pytest.fixture(scope="module")
def folder(make_cell, tmp_path_factory):
    """A checkpoint folder: a tiny model, and a tokenizer with a chat template and no fixed padding side."""
    options = make_cell(**WIDER).model
    tokenizer = options.tokenizer()
    tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("checkpoint")
    options.build(tokenizer, seed=7).save_pretrained(path)
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(path)
    return path


def test_a_folder_gives_back_the_model_and_its_tokenizer(folder, make_cell):
    built = make_cell(**WIDER).model
    loaded = make_cell(model="pretrained", **{"model.checkpoint": str(folder)}).model
    ours, theirs = built.tokenizer(), loaded.tokenizer()
    text = "<user>sort 31;"
    assert theirs.encode(text) == ours.encode(text)
    assert theirs.decode(theirs.encode(text)) == text
    assert (theirs.pad_token_id, theirs.eos_token_id) == (ours.pad_token_id, ours.eos_token_id)
    assert theirs.padding_side == "left"
    model = loaded.build(theirs, seed=0)
    assert torch.equal(logits(model), logits(built.build(ours, seed=7)))
    assert not model.training
    assert loaded.is_hub_id is False


def test_a_seed_is_a_set_of_weights(make_cell):
    options = make_cell().model
    tokenizer = options.tokenizer()
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, same, other = (logits(options.build(tokenizer, seed)) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_clean_copy_is_its_own_model(make_cell):
    options = make_cell().model
    model = options.build(options.tokenizer(), 0)
    copy = clean_copy(model)
    before = logits(copy)
    assert torch.equal(before, logits(model))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    assert torch.equal(logits(copy), before)
    assert not {p.data_ptr() for p in copy.parameters()} & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype(dtype, folder, make_cell):
    for overrides in ({}, {"model": "pretrained", "model.checkpoint": str(folder)}):
        options = make_cell(**overrides, **{"model.dtype": dtype, "model.warmup": None}).model
        model = options.build(options.tokenizer(), 0)
        assert {p.dtype for p in model.parameters()} == {options.torch_dtype}
        assert {p.dtype for p in clean_copy(model).parameters()} == {options.torch_dtype}


@pytest.mark.parametrize(
    ("format_name", "system"), [("plain", None), ("chat", None), ("chat", "sort the digits")], ids=str
)
def test_learner_steps_from_a_folder_and_a_file(format_name, system, folder, make_cell, run_in, tmp_path, monkeypatch):
    (tmp_path / "digit_reward.py").write_text(
        "def share(completions, **_):\n    return [sum(c.isdigit() for c in text) / 12 for text in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"sort {n}", "answer": str(n)}) + "\n" for n in range(5, 105, 5)))
    options = {
        "model.checkpoint": str(folder),
        "task.path": str(path),
        "task.format": format_name,
        "task.system": system,
        "task.reward_function": "digit_reward:share",
        "task.max_completion_length": 12,
        "task.num_prompts": 3,
        "task.num_generations": 4,
    }
    ran = run_in(tmp_path / "cell", make_cell(model="pretrained", task="file", steps=2, **options))
    assert ran.outcome["state"] == "completed", ran.outcome["error"]
    for row in ran.rows[1:]:
        assert row["reward_train"] > 0
        assert row["update_norm"] > 0
        assert row["old_mu_logratio_abs_mean"] < 1e-5
    assert [row["version"] for row in ran.rows] == [0, 1, 2]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"model": "pretrained", "model.checkpoint": "./nowhere"}, "model.checkpoint"),
        ({"model": "pretrained", "model.checkpoint": "nowhere"}, "hub id of the form owner/name"),
        ({"model": "pretrained", "model.checkpoint": "/tmp"}, "is no file"),
        ({"model": "pretrained", "model.checkpoint": "/tmp", "model.gguf_file": "absent.gguf"}, "model.gguf_file"),
        ({"model.checkpoint": "owner/name"}, "Set one of the two"),
        ({"model.config": {"vocab_size": 16}}, "model_type"),
        ({"model.alphabet": "0011"}, "each once"),
        ({"model.config.vocab_size": 15}, "at least 16"),
        ({"model.dtype": "float64"}, "one of float32, bfloat16, float16"),
    ],
)
def test_refused(overrides, reason, make_cell):
    with pytest.raises(OptionError, match=reason):
        make_cell(**overrides)


def test_a_hub_id_is_left_to_the_launch(make_cell):
    options = make_cell(model="pretrained", **{"model.checkpoint": "owner/name"}).model
    assert options.is_hub_id


def test_a_checkpoint_counts_by_what_it_holds(folder, make_cell, tmp_path):
    def cell(path, gguf_file=None):
        return make_cell(model="pretrained", **{"model.checkpoint": str(path), "model.gguf_file": gguf_file})

    copy = shutil.copytree(folder, tmp_path / "copy")
    first = cell(folder)
    assert cell(copy).cell_id == first.cell_id
    assert cell(copy).as_dict()["model"]["checkpoint"] == str(copy)
    (copy / "README.md").write_text("notes")
    assert cell(copy).cell_id == first.cell_id
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    assert cell(copy).cell_id != first.cell_id
    hub = cell("owner/name")
    assert hub.identity() == hub.as_dict()


def test_a_gguf_file_counts_by_size_and_both_ends(make_cell, tmp_path):
    def cell_id(name):
        options = {"model.checkpoint": str(tmp_path), "model.gguf_file": name}
        return make_cell(model="pretrained", **options).cell_id

    content = bytearray(3 * 2**20)
    for name, place in (("a", None), ("b", None), ("start", 5), ("end", -5), ("longer", None)):
        edited = bytearray(content) + (b"0" if name == "longer" else b"")
        if place is not None:
            edited[place] = 1
        (tmp_path / f"{name}.gguf").write_bytes(edited)
    ids = {name: cell_id(f"{name}.gguf") for name in ("a", "b", "start", "end", "longer")}
    assert ids["a"] == ids["b"]
    assert len(set(ids.values())) == 4


def test_a_character_outside_the_alphabet_is_no_padding(make_cell):
    tokenizer = make_cell(**{"model.alphabet": "ab\n"}).model.tokenizer()
    assert tokenizer.encode("a\n\nb") == [2, 4, 4, 3]
    with pytest.raises(Exception, match="Missing"):
        tokenizer.encode("abc")
