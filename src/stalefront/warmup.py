"""Supervised warm-up: teaches a fresh model the task from a noisy expert, once a seed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stalefront.files import locked
from stalefront.keys import keyed
from stalefront.ranks import SINGLE, Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stalefront.cell import Cell
    from stalefront.model import Warmup
    from stalefront.task import Row, Task

IGNORED = -100
# Fields of a model that come after its warm-up.
APART = ("ranks", "fp32_head", "deterministic_topk")


def start_model(cell: Cell, tokenizer: PreTrainedTokenizerBase, cache: Path, ranks: Ranks = SINGLE) -> PreTrainedModel:
    """π₀ of a cell: the model as built or loaded, after its warm-up if it has one.

    The warm-up's result is kept in `cache` under a hash of everything that shapes it, and every cell of a seed
    starts from that file; a second process that needs it waits for the first. Of several ranks the first makes it.
    """
    model = cell.model.build(tokenizer, cell.seed).to(cell.device)
    if cell.model.warmup is None:
        return model
    path = cache / f"warmup-{_key(cell)}.pt"
    with ranks.first_goes_first(), locked(path.with_suffix(".lock")):
        if not path.exists():
            train(model, tokenizer, cell.task, cell.model.warmup, cell.seed)
            tmp = path.with_suffix(f".{os.getpid()}.tmp")
            torch.save(model.state_dict(), tmp)
            os.replace(tmp, path)
    model.load_state_dict(torch.load(path, map_location=cell.device, weights_only=True))
    return model.eval()


def _key(cell: Cell) -> str:
    """Hash of what shapes the result; sampling options of the task and the number of ranks do not."""
    sampling = ("num_prompts", "num_generations", "max_completion_length", "temperature")
    parts = {
        "model": {k: v for k, v in cell.model.identity().items() if k not in APART},
        "task": {k: v for k, v in cell.task.identity().items() if k not in sampling},
        "numbers": [cell.seed, cell.device, cell.threads, torch.__version__],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, options: Warmup, seed: int) -> None:
    """Minimise the cross-entropy of noisy answers in place; AdamW (.9, .95), the rate falls linearly to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    alphabet = answer_alphabet(tokenizer, task, seed)
    model.train()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * (1 - step / options.steps)
        batch = noisy_batch(tokenizer, task, alphabet, options, seed, step)
        batch = {key: value.to(model.device) for key, value in batch.items()}
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    model.eval()


def answer_alphabet(tokenizer: PreTrainedTokenizerBase, task: Task, seed: int) -> list[int]:
    """Tokens that answers are made of, from the first 64 batches of training rows."""
    answers = [str(row["answer"]) for batch in range(1, 65) for row in task.train_rows(seed, batch)]
    return sorted({t for ids in tokenizer(answers, add_special_tokens=False)["input_ids"] for t in ids})


def noisy_batch(
    tokenizer: PreTrainedTokenizerBase, task: Task, alphabet: list[int], options: Warmup, seed: int, step: int
) -> dict[str, Any]:
    """Token ids, attention mask, position ids and labels (prompt and padding ignored) of one warm-up batch."""
    random = keyed(seed, "warmup noise", step)
    examples: list[Row] = []
    batch = 1 + step * options.batch_size
    while len(examples) < options.batch_size:
        examples += task.train_rows(seed, batch)
        batch += 1
    examples = examples[: options.batch_size]
    answers = tokenizer([str(row["answer"]) for row in examples], add_special_tokens=False)["input_ids"]
    rows: list[tuple[list[int], list[int]]] = []
    for prompt, answer in zip(task.encode(examples, tokenizer), answers, strict=True):
        wrong = random.random(len(answer)) < options.noise
        drawn = random.choice(alphabet, len(answer))
        noisy = [int(d) if w else a for a, d, w in zip(answer, drawn, wrong, strict=True)]
        rows.append((prompt, [*noisy, tokenizer.eos_token_id]))
    width = max(len(p) + len(a) for p, a in rows)
    pad = tokenizer.pad_token_id
    ids = [[pad] * (width - len(p) - len(a)) + p + a for p, a in rows]
    labels = [[IGNORED] * (width - len(a)) + a for _, a in rows]
    real = torch.tensor([[0] * (width - len(p) - len(a)) + [1] * (len(p) + len(a)) for p, a in rows])
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": real,
        "position_ids": (real.cumsum(-1) - 1).clamp(min=0),
        "labels": torch.tensor(labels),
    }
