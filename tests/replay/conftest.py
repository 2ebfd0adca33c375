"""A small mixture of experts whose routers are far from ties, on prompts of several lengths."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stalefront.build import build
from stalefront.cell import Cell
from stalefront.loop import Learner

REWARDS = "def digits(completions, **_):\n    return [float(sum(c.isdigit() for c in text)) for text in completions]\n"


@pytest.fixture(scope="session")
def ragged_task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Overrides of `task=file`: prompts of 2 to 8 tokens, and a reward that an untrained model gets some of."""
    folder = tmp_path_factory.mktemp("ragged")
    (folder / "ragged_rewards.py").write_text(REWARDS)
    texts = [f"_{'7305264'[: 1 + n % 7]}>" if n % 3 else f"{n % 10}+{n}=" for n in range(60)]
    rows = [{"prompt": text, "answer": str(n)} for n, text in enumerate(dict.fromkeys(texts))]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"path": str(folder / "rows.jsonl"), "reward_function": "ragged_rewards:digits"}
    sizes = {"num_prompts": 4, "num_generations": 4, "max_completion_length": 6}
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        yield {f"task.{key}": value for key, value in {**options, **sizes}.items()}


@pytest.fixture(scope="session")
def routed_cell(make_config: Callable[..., dict[str, Any]], ragged_task: dict[str, Any]) -> Callable[..., Cell]:
    """`routed_cell(replay="r3", …)`: see the module; takes the overrides of `make_config`."""

    def make(**overrides: Any) -> Cell:
        plain = {"model": "tiny_moe", "model.warmup": None, "task": "file", "optimizer.warmup_steps": 0, "steps": 6}
        config = make_config(**plain | {"optimizer.lr": 5e-3} | ragged_task | overrides)
        config["model"]["config"] |= {"initializer_range": 0.3}
        return Cell.from_config(config)

    return make


@pytest.fixture(scope="session")
def routed_learner(routed_cell: Callable[..., Cell], cache_dir: Path) -> Callable[..., Learner]:
    """`routed_learner(…)`: the learner of `routed_cell`, before its first step."""

    def make(**overrides: Any) -> Learner:
        cell = routed_cell(**overrides)
        return Learner(cell, build(cell, cache_dir))

    return make
