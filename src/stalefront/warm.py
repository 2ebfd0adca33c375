"""The warm parent: a process that has imported what cells need, and that cells are forked from."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

from stalefront.cell import Cell
from stalefront.choice import Choice
from stalefront.worker import THREAD_VARIABLES


def warm_context(cells: Sequence[Cell]) -> ForkServerContext:
    """Start the parent that cells are forked from; it imports what they need while the launcher goes on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules_to_preload(cells))
    threads = str(max(cell.threads for cell in cells))
    # Signals for the whole group, or for every process of a Slurm job, must not take this parent away: then nobody
    # would hear how its children end.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    try:
        # The tracker deals with the other signals itself. Starting it unblocks them, so it has to run before.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        # Read at import. Progress bars would fill the cells' logs.
        with environment({**dict.fromkeys(THREAD_VARIABLES, threads), "TQDM_DISABLE": "1"}):
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def modules_to_preload(cells: Iterable[Cell]) -> list[str]:
    """Modules that the cells' processes would import each for itself: seconds of every cell when left out.

    Importing starts no thread and touches no device, so that forking after it is safe; computing would do both.
    """
    names = [
        *("torch", "torch._dynamo", "torch.optim.adamw", "torch.utils.serialization", "tokenizers"),
        *("transformers.modeling_utils", "transformers.tokenization_utils_fast", "transformers.models.auto"),
        *("stalefront.run", "stalefront.loop", "stalefront.warmup", "stalefront.rollout", "stalefront.surrogate"),
    ]
    found = dict.fromkeys(names)
    for cell in cells:
        named: list[Choice] = [cell.model, cell.task, cell.delay, cell.loss, cell.engine, cell.proximal, cell.reduction]
        choices = [*named, *cell.correction, *cell.controller]
        found |= dict.fromkeys(type(choice).__module__ for choice in choices)
        family = (cell.model.config or {}).get("model_type")
        if family:
            found[f"transformers.models.{family}.modeling_{family}"] = None
        if cell.engine.choice() == "trl":
            found["trl.trainer.grpo_trainer"] = None
    return list(found)
