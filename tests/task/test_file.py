"""A dataset file: its rows and their order, bad lines, rewards, and plain and chat prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stalefront import warmup
from stalefront.choice import OptionError
from stalefront.digest import file_digest
from stalefront.model import character_tokenizer
from stalefront.task import RewardError
from stalefront.task.file import BUILTIN

DATA = Path(__file__).parents[2] / "src" / "stalefront" / "task" / "data"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def write(tmp_path):
    """`write(rows)`: a JSON-lines file; text goes in as it is."""

    def run(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return run


@pytest.fixture
def make_task(make_cell, write):
    """`make_task(rows, **fields)`: the task over a file of these rows."""

    def make(rows, **fields):
        options = {f"task.{name}": value for name, value in fields.items()}
        return make_cell(task="file", **({"task.path": write(rows), "task.num_prompts": 2} | options)).task

    return make


def rows(count):
    return [{"prompt": f"p{n}", "answer": n} for n in range(count)]


def test_every_pass_uses_every_training_row_once(make_task):
    task = make_task(rows(14), num_prompts=3, validation_share=0.15)  # 12 to train on, 2 held out
    assert task.validation_count == 2
    seen = [row["answer"] for batch in range(1, 9) for row in task.train_rows(0, batch)]
    first, second = seen[:12], seen[12:]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert {row["answer"] for row in task.validation_rows(0, 5)} == {12, 13}


def test_blank_lines_are_skipped_and_counted(make_task):
    task = make_task(
        [{"prompt": "a", "answer": 1}, "", {"prompt": "b", "answer": 2}, "  ", {"prompt": "c", "answer": 3}]
    )
    assert [row["prompt"] for row in task.rows] == ["a", "b", "c"]
    with pytest.raises(OptionError, match="line 4"):
        make_task([{"prompt": "a", "answer": 1}, "", {"prompt": "b", "answer": 2}, "oops"])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "Not JSON"),
        ("", None),
        ('["prompt", "answer"]', "It holds"),
        ('{"prompt": "x"}', "It holds"),
        ('{"answer": 1}', "It holds"),
        ("null", "It holds"),
    ],
)
def test_bad_rows_name_their_line(bad, reason, make_task):
    content = [*rows(2), bad, *rows(5)[2:]]
    if reason is None:
        make_task(content)
        return
    with pytest.raises(OptionError, match=rf"rows\.jsonl line 3.*{reason}") as caught:
        make_task(content)
    assert caught.value.field == "task.path"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"path": "/nowhere/rows.jsonl"}, "task.path"),
        ({"path": BUILTIN + "nothing.jsonl"}, "task.path"),
        ({"num_prompts": 10}, "at most 9, the training rows"),
        ({"validation_share": 0}, "task.validation_share"),
        ({"validation_share": 1}, "task.validation_share"),
        ({"stop": ""}, "task.stop"),
        ({"format": "markdown"}, "one of plain, chat"),
        ({"reward_function": "nothing"}, "one of exact, first_line, last_number, or module:function"),
        ({"reward_function": "math:nothing"}, "Importing it gave"),
        ({"reward_function": "no_such_module:f"}, "Importing it gave"),
    ],
)
def test_refused(fields, reason, make_task):
    with pytest.raises(OptionError, match=re.escape(reason)):
        make_task(rows(10), **fields)


def test_a_prompt_on_both_sides_of_the_split_is_refused(make_task):
    with pytest.raises(OptionError, match=r"On both sides: \['p0'\]"):
        make_task([*rows(9), {"prompt": "p0", "answer": 0}])


REWARDS = [
    ("exact", "12", "12", 1),
    ("exact", " 12\n", "12", 1),
    ("exact", "12", 12, 1),
    ("exact", "12.", "12", 0),
    ("exact", "the 12", "12", 0),
    ("exact", "", "12", 0),
    ("first_line", "12\n3 + 4 = 7", "12", 1),
    ("first_line", " 12 ", "12", 1),
    ("first_line", "\n12", "12", 1),
    ("first_line", "so\n12", "12", 0),
    ("first_line", "12 and more", "12", 0),
    ("first_line", "", "12", 0),
    ("last_number", "it is 12", "12", 1),
    ("last_number", "12 or 13", "12", 0),
    ("last_number", "about 1,234.50 in all", "1234.5", 1),
    ("last_number", "-3", "-3", 1),
    ("last_number", "minus 3", "-3", 0),
    ("last_number", "x = 5.", "5", 1),
    ("last_number", "none", "5", 0),
    ("last_number", "none", "none", 0),
    ("last_number", "42", "#### 42", 1),
]


@pytest.mark.parametrize(("name", "completion", "answer", "reward"), REWARDS)
def test_rewards(name, completion, answer, reward, make_task):
    task = make_task(rows(10), reward_function=name)
    assert task.score([{"prompt": "p", "answer": answer}], [completion], [[]]) == [reward]


@pytest.fixture
def own_rewards(tmp_path, monkeypatch):
    """A module of reward functions outside the package."""
    (tmp_path / "own_rewards.py").write_text(
        "def by_length(prompts, completions, completion_ids, answer, weight, **_):\n"
        "    return [w * len(c) for c, w in zip(completions, weight)]\n"
        "def short(completions, **_):\n"
        "    return [1.0]\n"
        "def skips(completions, **_):\n"
        "    return [None for _ in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_reward_function_of_ones_own_gets_every_column(own_rewards, make_task):
    content = [{**row, "weight": row["answer"] / 2} for row in rows(10)]
    task = make_task(content, reward_function="own_rewards:by_length")
    assert task.score(content[3:5], ["ab", "abc"], [[1, 2], [1, 2, 3]]) == [3.0, 6.0]


@pytest.mark.parametrize(("name", "reason"), [("short", "1 numbers for 2"), ("skips", "None for 'a' to 'p0'")])
def test_a_reward_function_that_skips_is_an_error(name, reason, own_rewards, make_task):
    task = make_task(rows(10), reward_function=f"own_rewards:{name}")
    with pytest.raises(RewardError, match=reason):
        task.score(rows(2), ["a", "b"], [[], []])


@pytest.fixture(scope="module")
def tokenizer():
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789<>;_ ")
    made.chat_template = TEMPLATE
    return made


CONVERSATION = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "go"},
]


@pytest.mark.parametrize(
    ("format_name", "system", "prompt", "text"),
    [
        ("plain", None, "2 and 3", "2 and 3"),
        ("plain", "be brief", "2 and 3", "2 and 3"),
        ("chat", None, "2 and 3", "<user>2 and 3;<assistant>"),
        ("chat", "be brief", "2 and 3", "<system>be brief;<user>2 and 3;<assistant>"),
        ("chat", None, CONVERSATION, "<user>hi;<assistant>yes;<user>go;<assistant>"),
        ("chat", "be brief", CONVERSATION, "<system>be brief;<user>hi;<assistant>yes;<user>go;<assistant>"),
    ],
)
def test_rendering(format_name, system, prompt, text, tokenizer, make_task):
    row = {"prompt": prompt, "answer": "5"}
    task = make_task(rows(10), format=format_name, system=system)
    assert task.render(row, tokenizer) == text
    assert tokenizer.decode(task.encode([row], tokenizer)[0]) == text
    assert row["prompt"] == prompt


def test_special_tokens_are_added_to_plain_text_alone(make_task):
    from tokenizers import processors

    made = character_tokenizer("abc<>;_usertin")
    made.chat_template = TEMPLATE
    start = ("<eos>", made.eos_token_id)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[start])
    row = {"prompt": "abc", "answer": ""}
    plain, chat = (make_task(rows(10), format=name).encode([row], made)[0] for name in ("plain", "chat"))
    assert plain[0] == made.eos_token_id
    assert made.eos_token_id not in chat


def test_the_additions_are_what_their_description_says(make_cell):
    text = (DATA / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    code, _, _ = program.partition("with open(")
    made = {}
    exec(code, made)
    expected = made["rows"][False] + made["rows"][True]
    task = make_cell(task="additions").task
    assert task.rows == expected
    for row in task.rows:
        *worked, asked = row["prompt"].split("\n")
        assert len(worked) == 8
        for line in worked:
            a, b, c = map(int, re.fullmatch(r"(\d) \+ (\d) = (\d+)", line).groups())
            assert a + b == c
        a, b = map(int, re.fullmatch(r"(\d) \+ (\d) =", asked).groups())
        assert row["answer"] == str(a + b)


def test_the_held_out_additions_are_not_asked_in_training(make_cell):
    task = make_cell(task="additions").task

    def asked(some):
        return {row["prompt"].split("\n")[-1] for row in some}

    cut = len(task.rows) - task.validation_count
    assert task.validation_count == 80
    assert len(asked(task.rows[cut:])) == 20
    assert not asked(task.rows[:cut]) & asked(task.rows[cut:])


def test_identity_is_the_content_and_not_the_path(make_cell, tmp_path, monkeypatch):
    def cell(path):
        return make_cell(task="file", **{"task.path": str(path), "task.num_prompts": 2})

    text = "".join(json.dumps(row) + "\n" for row in rows(10))
    for name in ("rows.jsonl", "copy.jsonl"):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    first = cell(tmp_path / "rows.jsonl")
    assert cell("rows.jsonl").cell_id == cell("copy.jsonl").cell_id == first.cell_id
    assert cell("rows.jsonl").as_dict()["task"]["path"] == "rows.jsonl"
    assert set(first.task.identity()) == set(first.task.as_dict()) - {"path"} | {"content"}
    (tmp_path / "rows.jsonl").write_text(text.replace("p9", "q9"))
    edited = cell("rows.jsonl")
    assert edited.cell_id != first.cell_id
    assert warmup._key(edited) != warmup._key(first)
    assert warmup._key(cell("copy.jsonl")) == warmup._key(first)


def test_a_file_is_hashed_once(make_task, monkeypatch):
    task = make_task(rows(10))
    monkeypatch.setattr("builtins.open", None)
    assert file_digest(task.source) == task.content
