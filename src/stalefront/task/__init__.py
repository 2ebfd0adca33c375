"""Seam `task`: prompts to sample from, prompts held out for validation, and a reward."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stalefront.choice import Choice, is_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A row has a `prompt` (text, or a list of chat messages), an `answer`, and any other columns a reward may use.
Row = dict[str, Any]
# TRL's signature: f(prompts, completions, completion_ids, **columns) -> one number a completion.
RewardFunction = Callable[..., list[float | None]]


class RewardError(ValueError):
    """A reward function gave something that is not a number a completion."""


@dataclass(frozen=True)
class Task(Choice):
    """Base of every task.

    Attributes
    ----------
    num_prompts : int
        Prompts P of a rollout batch.
    num_generations : int
        Samples G of each prompt.
    max_completion_length : int
        Tokens; longer completions are cut and counted as truncated.
    temperature : float
        Of sampling, and of every log-prob recorded or trained on.
    """

    num_prompts: int
    num_generations: int
    max_completion_length: int
    temperature: float

    def check(self) -> None:
        """Counts, and a temperature that log-probs can be taken at."""
        for name in ("num_prompts", "max_completion_length"):
            self.require(is_count(getattr(self, name)), name, "a whole number of at least 1")
        legal = "a whole number of at least 2: advantages are relative to a group"
        self.require(self.num_generations >= 2, "num_generations", legal)
        self.require(math.isfinite(self.temperature) and self.temperature > 0, "temperature", "a finite number above 0")

    @abstractmethod
    def train_rows(self, seed: int, batch: int) -> list[Row]:
        """The P rows of rollout batch `batch` (from 1); the same seed and batch give the same rows."""

    @abstractmethod
    def validation_rows(self, seed: int, count: int) -> list[Row]:
        """`count` held-out rows; none of them can ever be a training row."""

    @property
    @abstractmethod
    def reward(self) -> RewardFunction:
        """Reward function in TRL's signature; pure."""

    def rows_to_check(self, seed: int) -> list[Row]:
        """Rows that a launch looks at before it starts anything: all there are, or a sample where they are made up."""
        return [*self.train_rows(seed, 1), *self.validation_rows(seed, 32)]

    @property
    def answer_is_completion(self) -> bool:
        """Whether only a completion that spells out the answer is right, so that the model must be able to say it."""
        return True

    @property
    def uses_template(self) -> bool:
        """Whether `render` uses the tokenizer's chat template; where it does not, it leaves the tokenizer alone."""
        return False

    def render(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
        """Text the model is given for `row`."""
        return str(row["prompt"])

    @property
    def special_tokens(self) -> bool:
        """Whether the tokenizer adds the special tokens it starts a text with."""
        return True

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Token ids of every row's `render`."""
        texts = [self.render(row, tokenizer) for row in rows]
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=self.special_tokens)["input_ids"]
        return ids

    def stop_text(self) -> str | None:
        """Text that ends a completion besides the end token."""
        return None

    def score(self, rows: Sequence[Row], completions: list[str], completion_ids: list[list[int]]) -> list[float]:
        """Rewards of completions, one row each; raises `RewardError` when the function skips one."""
        columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
        prompts = [row["prompt"] for row in rows]
        rewards = self.reward(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        if len(rewards) != len(rows):
            raise RewardError(f"the reward function gave {len(rewards)} numbers for {len(rows)} completions")
        for index, value in enumerate(rewards):
            if value is None or not math.isfinite(value):
                where = f"{completions[index]!r} to {prompts[index]!r}"
                raise RewardError(f"the reward function gave {value} for {where}; a reward is a finite number")
        return [float(value) for value in rewards if value is not None]
