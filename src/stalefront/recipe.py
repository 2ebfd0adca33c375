"""A recipe: loss, corrections, reduction, proximal policy and controllers that stand for another framework's options.

It is built from the defaults in `conf/` with fields replaced, so it says exactly what a user could have written by
hand, and `Recipe.overrides` is that text.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from stalefront.cell import LISTS, make_choice, refuse_repeats

if TYPE_CHECKING:
    from stalefront.controller import Controller
    from stalefront.correction import Correction
    from stalefront.loss import Loss
    from stalefront.proximal import Proximal
    from stalefront.reduction import Reduction

# What a recipe decides: the groups of a cell that a framework stands for.
DECIDES = ("loss", "correction", "reduction", "proximal", "controller")

Entry = dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """The live choices of a recipe: a `stalefront.objective.Method`, and the controllers."""

    loss: Loss
    correction: tuple[Correction, ...]
    reduction: Reduction
    proximal: Proximal
    controller: tuple[Controller, ...]


@dataclass(frozen=True)
class Recipe:
    """Choices by group, each a mapping of `choice` and all its fields.

    Attributes
    ----------
    correction, controller
        In the order they act.
    notes
        What differs from the framework, in words.
    """

    loss: Entry
    correction: tuple[Entry, ...]
    reduction: Entry
    proximal: Entry
    controller: tuple[Entry, ...] = ()
    notes: tuple[str, ...] = ()

    def config(self) -> dict[str, Any]:
        """The groups as a cell's configuration holds them."""
        return {group: copy.deepcopy(getattr(self, group)) for group in DECIDES}

    def parts(self) -> Parts:
        """Live choices; raises `OptionError` about values that cannot work."""
        for group in set(LISTS) & set(DECIDES):
            refuse_repeats(group, [entry["choice"] for entry in getattr(self, group)])
        return Parts(
            loss=make_choice("loss", self.loss),
            correction=tuple(make_choice("correction", entry) for entry in self.correction),
            reduction=make_choice("reduction", self.reduction),
            proximal=make_choice("proximal", self.proximal),
            controller=tuple(make_choice("controller", entry) for entry in self.controller),
        )

    def overrides(self) -> list[str]:
        """The same in Hydra's grammar: choices, and the fields that differ from their defaults."""
        found: list[str] = []
        for group in DECIDES:
            value = getattr(self, group)
            if group in LISTS:
                found += _list_overrides(group, value)
            else:
                found += [f"{group}={value['choice']}", *_field_overrides(group, group, value)]
        return found


def entry(group: str, choice: str, **fields: Any) -> Entry:
    """The choice of a group with its defaults from `conf/`, and `fields` in their place."""
    values = defaults(group, choice)
    unknown = fields.keys() - values.keys()
    if unknown:
        raise KeyError(f"{group}={choice} has no {', '.join(sorted(unknown))}")
    return {"choice": choice, **values, **fields}


def recipe(
    loss: Entry,
    *,
    correction: Sequence[Entry] = (),
    reduction: Entry | None = None,
    proximal: Entry | None = None,
    controller: Sequence[Entry] = (),
    notes: Sequence[str] = (),
) -> Recipe:
    """A recipe with the project's own choices where nothing is given."""
    return Recipe(
        loss=loss,
        correction=tuple(correction),
        reduction=reduction or entry("reduction", "own"),
        proximal=proximal or entry("proximal", "recompute"),
        controller=tuple(controller),
        notes=tuple(notes),
    )


def defaults(group: str, choice: str) -> dict[str, Any]:
    """Fields of a choice as its file in `conf/` has them."""
    values: dict[str, Any] = copy.deepcopy(_read(group, choice))
    values.pop("_target_", None)
    return values


@cache
def _read(group: str, choice: str) -> dict[str, Any]:
    # OmegaConf reads 5e-4 as a number, as Hydra does; a plain YAML 1.1 reader gives text.
    from omegaconf import OmegaConf

    text = (resources.files("stalefront.conf") / group / f"{choice}.yaml").read_text(encoding="utf-8")
    plain = OmegaConf.to_container(OmegaConf.create(text))
    return {str(key): value for key, value in plain.items()} if isinstance(plain, Mapping) else {}


def _list_overrides(group: str, entries: Sequence[Entry]) -> list[str]:
    if not entries:
        return []
    names = ",".join(one["choice"] for one in entries)
    fields = [text for one in entries for text in _field_overrides(f"{group}.{one['choice']}", group, one)]
    return [f"{group}=[{names}]", *fields]


def _field_overrides(key: str, group: str, given: Entry) -> list[str]:
    from stalefront.grid import to_grammar

    usual = defaults(group, given["choice"])
    return [
        f"{key}.{field}={to_grammar(value)}"
        for field, value in given.items()
        if field != "choice" and (value != usual[field] or type(value) is not type(usual[field]))
    ]
