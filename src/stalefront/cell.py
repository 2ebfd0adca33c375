"""A cell: one run of the grid, fully resolved, with an identity that depends on what changes its numbers alone."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from stalefront.choice import Choice, OptionError, is_count
from stalefront.controller import Controller
from stalefront.correction import Correction
from stalefront.delay import Delay
from stalefront.engine import Engine
from stalefront.loss import Loss
from stalefront.mismatch import Mismatch
from stalefront.model import Model
from stalefront.optimizer import Optimizer
from stalefront.proximal import Proximal
from stalefront.reduction import Reduction
from stalefront.replay import Replay
from stalefront.task import Task

# Seeds that every consumer takes: NumPy and transformers refuse larger ones.
MAX_SEED = 2**32 - 1
DEVICE = re.compile(r"cpu|mps|cuda(:\d+)?")

GROUPS = ("model", "task", "delay", "loss", "proximal", "reduction", "engine", "replay")
# The one key of a composed list that names no entry of it.
TARGET_KL = "target_kl"
# Ordered lists of choices.
LISTS = ("mismatch", "correction", "controller")

# Dotted path → value at which a field added after the first release changes nothing. Such a field is left out of
# the identity at that value, so that cells recorded before it keep their ids. A path goes through every entry of a
# list. A group that is missing from a record has its neutral value.
NEUTRAL: dict[str, Any] = {
    "model.ranks": 1,
    "loss.anchor": "theta/old",
    "loss.clamp_nats": None,
    "loss.dual_clip": None,
    "loss.value_cap": None,
    "loss.floor": 0.0,
    "loss.ppo_mask": False,
    "loss.over": "valid",
    "loss.gradient": "sequence",
    "loss.sequence_clamp_nats": None,
    "loss.advantage": "token",
    "loss.length_epsilon": 0.0,
    "correction.clamp_nats": None,
    "correction.floor": 0.0,
    "proximal": {"choice": "recompute"},
    "reduction": {
        **{"choice": "own", "denominator": "valid", "advantages_over": "all"},
        **{"skip_empty": False, "epsilon": 0.0, "epsilon_on": "both"},
    },
    "controller": [],
    "mismatch": [],
    "target_kl": None,
    "replay": {"choice": "none", "probe_every": 0},
    "model.fp32_head": "none",
    "model.deterministic_topk": False,
}


@dataclass(frozen=True)
class Validation(Choice):
    """Held-out evaluation: `num_samples` answers every `every` learner steps."""

    every: int
    num_samples: int

    @classmethod
    def key(cls, field: str) -> str:
        """Override key of `field`."""
        return f"validation.{field}"

    def check(self) -> None:
        """Both are counts."""
        self.require(is_count(self.every), "every", "a whole number of at least 1")
        self.require(is_count(self.num_samples), "num_samples", "a whole number of at least 1")


@dataclass(frozen=True)
class Cell(Choice):
    """One run: everything that changes its numbers, and nothing else.

    Attributes
    ----------
    seed : int
        Keys sampling, prompts, weight initialisation and warm-up.
    steps : int
        Horizon T in learner steps.
    device, threads
        Part of the identity, since the last bits of a sum depend on them.
    target_kl : float or None
        What the strengths of `mismatch` are multiplied for, nats a token; set as `mismatch.target_kl`.
    """

    seed: int
    steps: int
    device: str
    threads: int
    model: Model
    task: Task
    delay: Delay
    mismatch: tuple[Mismatch, ...]
    target_kl: float | None
    replay: Replay
    loss: Loss
    proximal: Proximal
    correction: tuple[Correction, ...]
    reduction: Reduction
    controller: tuple[Controller, ...]
    optimizer: Optimizer
    engine: Engine
    validation: Validation

    def check(self) -> None:
        """Counts, the device's form, and the pairs of options that cannot be combined."""
        self.require(0 <= self.seed <= MAX_SEED, "seed", f"a whole number from 0 to {MAX_SEED}")
        self.require(is_count(self.steps), "steps", "a whole number of at least 1")
        self.require(is_count(self.threads), "threads", "a whole number of at least 1")
        legal = "cpu, cuda, cuda:<index> or mps"
        self.require(bool(DEVICE.fullmatch(self.device)), "device", legal, "An index is a whole number, as in cuda:0.")
        for group in LISTS:
            refuse_repeats(group, [entry.choice() for entry in getattr(self, group)])
        from stalefront.pairs import check_pairs

        check_pairs(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Cell:
        """Cell of a composed configuration or of a recorded `config.json`; raises `OptionError`."""
        values: dict[str, Any] = {key: config[key] for key in ("seed", "steps", "device", "threads") if key in config}
        for group in GROUPS:
            values[group] = make_choice(group, config.get(group, NEUTRAL.get(group)))
        for group in LISTS:
            values[group] = tuple(make_choice(group, entry) for entry in _entries(config.get(group)))
        values["target_kl"] = _target_kl(config)
        values["optimizer"] = Optimizer.from_mapping(config["optimizer"])
        values["validation"] = Validation.from_mapping(config["validation"])
        return cls.from_mapping(values)

    @cached_property
    def cell_id(self) -> str:
        """Twelve hex digits of the hash of `identity`, fields at their neutral value left out."""
        return identity(self.identity())

    @property
    def kept_versions(self) -> int:
        """Older versions of the weights to keep: for the delay, and for a cache that weight pushes do not clear."""
        pushes = max((entry.older_pushes for entry in self.mismatch), default=0)
        return self.delay.kept_versions + pushes * self.delay.steps_per_batch

    @property
    def S(self) -> int:
        """Number of versions the age of a token can take: 1 is on-policy."""
        return self.delay.max_lag_updates + 1


def identity(cell: Mapping[str, Any], neutral: Mapping[str, Any] | None = None) -> str:
    """Hash of `Cell.identity`; see `NEUTRAL`."""
    pruned = json.loads(json.dumps(cell))
    for path, value in (NEUTRAL if neutral is None else neutral).items():
        _prune(pruned, path.split("."), value)
    text = json.dumps(pruned, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _prune(node: Any, path: list[str], neutral: Any) -> None:
    """Remove what `path` leads to where it has its neutral value."""
    key, *rest = path
    for part in node if isinstance(node, list) else [node]:
        if not isinstance(part, dict) or key not in part:
            continue
        if rest:
            _prune(part[key], rest, neutral)
        elif part[key] == neutral:
            del part[key]


def stored_identity(stored: Mapping[str, Any], cell: Cell) -> str:
    """Hash of a recorded `as_dict`, where the files it names are taken to hold what those of `cell` hold.

    A file that has moved since keeps the id, and one that is gone needs not be read.
    """
    plain: dict[str, Any] = dict(stored)
    for group in GROUPS:
        choice, recorded = getattr(cell, group), stored.get(group)
        if choice.sources() and isinstance(recorded, Mapping):
            ours, named = choice.identity(), choice.as_dict()
            # Fields that say where a file lies, and what stands in their place.
            moved = {key for key in named if key not in ours or ours[key] != named[key]}
            content = {key: value for key, value in ours.items() if key not in named or key in moved}
            plain[group] = {key: value for key, value in recorded.items() if key not in moved} | content
    return identity(plain)


def refuse_repeats(group: str, names: list[str]) -> None:
    """Raise `OptionError` when a list of choices names one twice: a repeat has no key of its own to be set by."""
    if len(set(names)) < len(names):
        raise OptionError(group, names, "a list that names each choice once", "Remove the repeat.")


def make_choice(group: str, config: Any) -> Any:
    """Instance of the choice that `config` names, by `choice` (a record) or by `_target_` (a composed file).

    Only names inside `stalefront.<group>` are followed: a method is named code of this package, never an
    import path that a configuration file brings in.
    """
    if not isinstance(config, Mapping) or not ("choice" in config or "_target_" in config):
        raise OptionError(group, config, f"one of the choices of the group {group}", f"Give {group}=<choice>.")
    target = str(config.get("_target_", f"stalefront.{group}.{config.get('choice')}."))
    module_name, _, class_name = target.rpartition(".")
    if not module_name.startswith(f"stalefront.{group}."):
        raise OptionError(f"{group}._target_", target, f"a class inside stalefront.{group}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise OptionError(group, config.get("choice", target), f"a module of stalefront.{group}") from error
    kind = _choice_class(module, class_name)
    return kind.from_mapping(_completed(group, kind, config) if "choice" in config else config)


def _completed(group: str, kind: type[Choice], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded choice with the fields that are younger than its record, at the values that change nothing."""
    paths = {field.name: f"{group}.{field.name}" for field in fields(kind)}
    return {name: NEUTRAL[path] for name, path in paths.items() if path in NEUTRAL} | dict(recorded)


def _choice_class(module: Any, class_name: str) -> type[Choice]:
    """The named class of `module`, or the only public choice it defines."""
    if class_name:
        found: type[Choice] = getattr(module, class_name)
        return found
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Choice) and value.__module__ == module.__name__
    ]
    return next(value for value in own if getattr(value, "is_public", True))


def _entries(config: Any) -> list[Any]:
    """Ordered entries of a list-valued group: a mapping name → entry when composed, a list when recorded."""
    if config is None:
        return []
    if isinstance(config, Mapping):
        return [entry for name, entry in config.items() if name != TARGET_KL]
    return list(config)


def _target_kl(config: Mapping[str, Any]) -> Any:
    """Composed beside the entries of `mismatch`, recorded on its own."""
    composed = config.get("mismatch")
    value = composed.get(TARGET_KL) if isinstance(composed, Mapping) else config.get(TARGET_KL)
    if value is not None and type(value) not in (int, float):
        raise OptionError("mismatch.target_kl", value, "null, or a finite number of at least 0: nats a token")
    return value


State = Literal["planned", "submitted", "running", "interrupted", "completed", "non-finite", "failed"]
FINISHED: tuple[State, ...] = ("completed", "non-finite")
