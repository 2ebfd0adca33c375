"""Other frameworks' options, by their own names and defaults, turned into recipes of ours.

One module a framework: its table of options, what of it we refuse and why, and `compose`. Defaults and their comments
are in `conf/framework/<name>.yaml`, where `framework=<name> framework.<option>=…` finds them.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from stalefront.choice import OptionError, settle
from stalefront.recipe import defaults

if TYPE_CHECKING:
    from stalefront.parity import Case, GoldenFile
    from stalefront.recipe import Recipe


@dataclass(frozen=True)
class Option:
    """An option that we honour.

    Attributes
    ----------
    kind
        Its type as an annotation: `float | None`, `Literal["token", "sequence"] | None`, …
    paths
        Where it lives in that framework's own configuration tree, dotted; None for its name alone, empty for an option
        that its configuration does not have (which trainer runs, say).
    """

    kind: Any
    paths: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Unshared:
    """An option that we do not honour.

    Attributes
    ----------
    reason
        Why, and what to do instead, as a sentence.
    off
        Values at which it does nothing, so that they are let through.
    paths
        See `Option`.
    """

    reason: str
    off: tuple[Any, ...] = (None, False)
    paths: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Framework:
    """A framework's options and what they mean here.

    Attributes
    ----------
    name : str
        Stem of its module and of its file in `conf/framework/`.
    source : str
        Repository and commit that the mapping was read from.
    options
        By name, as a user of that framework writes it; nested names with dots.
    compose
        From all options (by name, defaults filled in, types settled) to a recipe.
    case
        How a golden file of this framework is evaluated; raises `stalefront.parity.Declined`.
    tolerance : float
        Relative error up to which numbers count as equal: 1e-9, or more where the framework works in float32.
    sections
        Parts of its configuration tree that hold nothing but algorithm options, dotted: an unknown key in there is
        refused by `stalefront import-config`, elsewhere it is only reported.
    not_shared
        Options that we refuse.
    quirks
        Behaviour of the framework that a recipe does not have, one sentence each.
    """

    name: str
    source: str
    options: Mapping[str, Option]
    compose: Callable[[dict[str, Any]], Recipe]
    case: Callable[[GoldenFile], Case]
    tolerance: float = 1e-9
    sections: tuple[str, ...] = ()
    not_shared: Mapping[str, Unshared] = field(default_factory=dict)
    quirks: tuple[str, ...] = ()

    def defaults(self) -> dict[str, Any]:
        """Default of every option, by its dotted name."""
        tree = defaults("framework", self.name)
        tree.pop("choice")
        return dict(flatten(tree, self.options))

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options, `given` (nested or dotted) in place of defaults; raises `OptionError`."""
        values = self.defaults()
        for name, value in flatten(given, {**self.options, **self.not_shared}):
            if name in self.options:
                values[name] = value
            elif name not in self.not_shared or not _is_one_of(value, self.not_shared[name].off):
                raise self.unknown(name, value)
        return {name: settle(self.options[name].kind, value, f"framework.{name}") for name, value in values.items()}

    def recipe(self, given: Mapping[str, Any]) -> Recipe:
        """What `given` options mean here; raises `OptionError`."""
        made = self.compose(self.read(given))
        made.parts()
        return made

    def unknown(self, name: str, value: object) -> OptionError:
        """Error about an option that is not ours, or that this framework does not have."""
        if name in self.not_shared:
            reason = self.not_shared[name].reason
            return OptionError(f"framework.{name}", value, f"no value here: {self.name}'s {name} is not shared", reason)
        known = sorted(self.options)
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        last = name.rsplit(".", 1)[-1]
        close = close or [option for option in known if option.rsplit(".", 1)[-1] == last]
        hint = f"Did you mean {' or '.join(close)}?" if close else f"docs/frameworks.md lists {self.name}'s."
        return OptionError(f"framework.{name}", value, f"one of {self.name}'s options: {', '.join(known)}", hint)


def refuse(name: str, value: object, legal: str, way_out: str = "") -> OptionError:
    """Error about an option's value, by the name that the user types."""
    return OptionError(f"framework.{name}", value, legal, way_out)


def flatten(tree: Mapping[str, Any], known: Iterable[str], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of a tree whose leaves are `known` names or no mappings."""
    found: list[tuple[str, Any]] = []
    names = set(known)
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in names:
            found += flatten(value, names, f"{name}.")
        else:
            found.append((name, value))
    return found


def names() -> list[str]:
    """Every framework that there is a mapping for."""
    folder = resources.files("stalefront.conf") / "framework"
    stems = [file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")]
    return sorted(stem for stem in stems if stem != "none")


@cache
def framework(name: str) -> Framework:
    """The framework of that name; raises `OptionError`."""
    if name not in names():
        raise OptionError("framework", name, f"one of {', '.join(names())}")
    found: Framework = importlib.import_module(f"stalefront.frameworks.{name}").FRAMEWORK
    return found


def _is_one_of(value: Any, legal: tuple[Any, ...]) -> bool:
    """True for an equal value of the same type: 0 is not False."""
    return any(type(value) is type(one) and value == one for one in legal)
