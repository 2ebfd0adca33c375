"""A dataset file of prompts and answers, for any model, in plain or in chat format."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stalefront.choice import OptionError
from stalefront.digest import file_digest
from stalefront.keys import keyed
from stalefront.task import RewardFunction, Row, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN = "builtin:"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class File(Task):
    """Rows of a JSON-lines file: `prompt`, `answer`, and any columns the reward function takes.

    A cell is identified by what the file holds, wherever it lies. The code behind `module:function` is not looked
    at: after a change of it, give the function another name or use another sweep directory.

    Attributes
    ----------
    path
        The file; `builtin:<name>` is one that ships with the package.
    format
        `plain`: the prompt is the text. `chat`: the prompt is a user message (or a list of messages) rendered by the
        tokenizer's chat template, after the `system` message if there is one.
    reward_function
        `exact` (the completion, stripped, is the answer), `first_line` (its first line is), `last_number` (the last
        number in it equals the answer's), or `module:function` with TRL's signature.
    stop
        Text that ends a completion, besides the end token; null for none.
    validation_share
        Share of rows, at the file's end, held out for validation.
    """

    path: str
    format: Literal["plain", "chat"]
    system: str | None
    reward_function: str
    stop: str | None
    validation_share: float

    def check(self) -> None:
        """The file is there, has rows of the right form, and enough of them on both sides of the split."""
        super().check()
        self.require(0 < self.validation_share < 1, "validation_share", "a share above 0 and below 1")
        self.require(self.stop != "", "stop", "a text, or null for none")
        self.require(self.source.is_file(), "path", f"a JSON-lines file; {self.source} is none")
        self.content  # noqa: B018  # taken now: a later edit must not change what this object is
        cut = len(self.rows) - self.validation_count
        held_out = {str(row["prompt"]) for row in self.rows[cut:]}
        shared = [row["prompt"] for row in self.rows[:cut] if str(row["prompt"]) in held_out]
        legal = "a file whose held-out rows share no prompt with its training rows"
        self.require(not shared, "path", legal, f"On both sides: {shared[:1]!r}.")
        legal = f"at most {cut}, the training rows of {self.path}"
        self.require(self.num_prompts <= cut, "num_prompts", legal, "Ask for fewer prompts, or add rows.")
        self.reward  # noqa: B018  # resolves the name now, so that a typo costs nothing

    @property
    def source(self) -> Path:
        """Where the file lies."""
        if self.path.startswith(BUILTIN):
            return Path(str(files("stalefront.task") / "data" / self.path.removeprefix(BUILTIN)))
        return Path(self.path).expanduser()

    @cached_property
    def rows(self) -> list[Row]:
        """All rows; raises `OptionError` with the line number of the first bad one."""
        rows: list[Row] = []
        for number, line in enumerate(self.source.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                rows.append(_row(line, f"{self.path} line {number}"))
        return rows

    def identity(self) -> dict[str, Any]:
        """`content`, a hash of the file's bytes, in the place of `path`."""
        found = super().identity()
        del found["path"]
        return found | {"content": self.content}

    @cached_property
    def content(self) -> str:
        """Hash of the file as it was when `rows` were read."""
        return file_digest(self.source)

    def sources(self) -> dict[str, Path]:
        """The file."""
        return {"path": self.source}

    @property
    def validation_count(self) -> int:
        """Rows held out: the last ones of the file, at least one."""
        return max(1, round(len(self.rows) * self.validation_share))

    def train_rows(self, seed: int, batch: int) -> list[Row]:
        """Passes over the training rows in an order that is new in every pass; no row is left out of a pass."""
        rows = self.rows[: len(self.rows) - self.validation_count]
        start = (batch - 1) * self.num_prompts
        chosen = []
        for position in range(start, start + self.num_prompts):
            epoch, offset = divmod(position, len(rows))
            chosen.append(rows[int(keyed(seed, "file order", epoch).permutation(len(rows))[offset])])
        return chosen

    def validation_rows(self, seed: int, count: int) -> list[Row]:
        """`count` held-out rows; a smaller set is gone through several times."""
        rows = self.rows[-self.validation_count :]
        order = keyed(seed, "file validation").permutation(len(rows))
        return [rows[int(order[i % len(rows)])] for i in range(count)]

    def rows_to_check(self, seed: int) -> list[Row]:
        """Every row of the file."""
        return self.rows

    @property
    def answer_is_completion(self) -> bool:
        """`last_number` and functions from elsewhere may take the answer for something else."""
        return self.reward_function in ("exact", "first_line")

    @cached_property
    def reward(self) -> RewardFunction:
        """The named function."""
        if self.reward_function in REWARDS:
            return REWARDS[self.reward_function]
        module_name, _, name = self.reward_function.partition(":")
        legal = f"one of {', '.join(REWARDS)}, or module:function"
        try:
            found: RewardFunction = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError, ValueError) as error:
            field = self.key("reward_function")
            raise OptionError(field, self.reward_function, legal, f"Importing it gave: {error}.") from error
        return found

    def render(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
        """Plain text, or the chat template's text up to where the assistant begins."""
        if not self.uses_template:
            return str(row["prompt"])
        prompt = row["prompt"]
        messages = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    @property
    def uses_template(self) -> bool:
        """In chat format."""
        return self.format == "chat"

    @property
    def special_tokens(self) -> bool:
        """A chat template spells out its special tokens itself; plain text gets the tokenizer's."""
        return not self.uses_template

    def stop_text(self) -> str | None:
        """`stop`."""
        return self.stop


def _row(line: str, where: str) -> Row:
    legal = 'a JSON object with "prompt" and "answer"'
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise OptionError("task.path", where, legal, f"Not JSON: {error}.") from error
    if not (isinstance(row, dict) and "prompt" in row and "answer" in row):
        raise OptionError("task.path", where, legal, f"It holds {line[:80]!r}.")
    return row


def exact(completions: list[str], answer: list[Any], **_: Any) -> list[float | None]:
    """1 where the stripped completion is the answer."""
    return [float(text.strip() == str(gold)) for text, gold in zip(completions, answer, strict=True)]


def first_line(completions: list[str], answer: list[Any], **_: Any) -> list[float | None]:
    """1 where the first line, stripped, is the answer."""
    heads = [text.strip().split("\n")[0].strip() for text in completions]
    return [float(head == str(gold)) for head, gold in zip(heads, answer, strict=True)]


def last_number(completions: list[str], answer: list[Any], **_: Any) -> list[float | None]:
    """1 where the last number of the completion equals the answer's last number; thousands commas are ignored."""
    pairs = [(_last(text), _last(str(gold))) for text, gold in zip(completions, answer, strict=True)]
    return [float(found is not None and found == gold) for found, gold in pairs]


def _last(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


REWARDS: dict[str, RewardFunction] = {"exact": exact, "first_line": first_line, "last_number": last_number}
