"""From a cell to live objects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stalefront.choice import OptionError
from stalefront.ranks import SINGLE, Ranks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stalefront.cell import Cell
    from stalefront.decoding import Prompts
    from stalefront.rollout import Sampler
    from stalefront.task import Row


# Prompts sampled side by side in a validation, a bound on memory. A row's random numbers do not depend on it; the last
# bits of its log-probs may, as with any shape of a forward.
VALIDATION_CHUNK = 128


@dataclass
class Parts:
    """Live objects of a cell.

    Attributes
    ----------
    model, reference
        The policy at π₀, and a frozen copy of it (the KL reference).
    minibatch_rows
        Rows of a rollout batch for each part it is cut into (outer) and each micro-batch of that part (inner).
    validation
        Held-out rows of this rank and their padded prompts, in chunks sampled side by side, each with the number of its
        first row among all; the same at every validation.
    ranks
        The processes that share the cell.
    routed : bool
        The model has routers, and they are understood: routes are recorded.
    """

    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    reference: PreTrainedModel
    sampler: Sampler
    minibatch_rows: list[list[torch.Tensor]]
    validation: list[tuple[int, list[Row], Prompts]]
    device: torch.device
    ranks: Ranks = SINGLE
    routed: bool = False


def build(cell: Cell, cache: Path, ranks: Ranks = SINGLE) -> Parts:
    """Load or make the model, warm it up if asked for, and set up sampling; weights are those of the first rank."""
    import torch

    from stalefront.rollout import Sampler
    from stalefront.setup import dress, trainer_copy
    from stalefront.warmup import start_model

    tokenizer = cell.model.tokenizer()
    model = start_model(cell, tokenizer, cache, ranks)
    ranks.take_from_first(list(model.state_dict().values()))
    dress(model, cell.model)
    sampler = Sampler(
        tokenizer,
        max_completion_length=cell.task.max_completion_length,
        temperature=cell.task.temperature,
        stop=cell.task.stop_text(),
        end_ids=end_ids(model, tokenizer),
    )
    device = torch.device(cell.device)
    held_out = cell.task.validation_rows(cell.seed, cell.validation.num_samples)
    mine = ranks.span(len(held_out))
    return Parts(
        tokenizer=tokenizer,
        model=model,
        reference=trainer_copy(model, cell.model),
        sampler=sampler,
        minibatch_rows=row_slices(cell, device),
        validation=[
            (mine.start + number * VALIDATION_CHUNK, chunk, sampler.pad(cell.task.encode(chunk, tokenizer), device))
            for number, chunk in enumerate(chunks(held_out[mine], VALIDATION_CHUNK))
        ],
        device=device,
        ranks=ranks,
        routed=has_routers(model),
    )


def has_routers(model: PreTrainedModel) -> bool:
    """True where the model chooses experts in a way that can be recorded and replayed."""
    from stalefront.routing import RoutingError, find_routers

    try:
        find_routers(model)
    except RoutingError:
        return False
    return True


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a completion: the tokenizer's, and those of the model's generation configuration."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    listed = declared if isinstance(declared, list) else [declared]
    return sorted({int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None})


def chunks(rows: list[Row], size: int) -> list[list[Row]]:
    """`rows` in order, at most `size` at a time."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def row_slices(cell: Cell, device: torch.device) -> list[list[torch.Tensor]]:
    """Rows by part and by micro-batch: whole groups, in order."""
    import torch

    rows = torch.arange(cell.task.num_prompts * cell.task.num_generations, device=device)
    return [list(part.chunk(cell.optimizer.grad_accum)) for part in rows.chunk(cell.delay.parts_per_batch)]


def check_identity(cell: Cell, cell_id: str) -> None:
    """Raise `OptionError` when `cell`, read from its record, is not the cell that the id was made from.

    The record is the same, so the files it names are not: a cell must never run on other data than it was planned with.
    """
    if cell.cell_id == cell_id:
        return
    legal = f"what it was when cell {cell_id} was planned"
    for choice in (cell.model, cell.task):
        for field, path in choice.sources().items():
            way_out = f"{path.absolute()} or the record was edited: the sweep's command plans it as a new cell."
            raise OptionError(choice.key(field), str(getattr(choice, field)), legal, way_out)
    raise OptionError("cell_id", cell.cell_id, cell_id, "The record of this cell was edited: plan it again.")
