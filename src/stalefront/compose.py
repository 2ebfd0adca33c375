"""From overrides to validated cells, fast enough for grids of ten thousand.

Hydra composes a configuration in about 0.1 s. What it decides there, the choice of groups, is shared by most cells of
a grid: each distinct choice is composed once, and plain values are set on copies.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from stalefront.cell import Cell, refuse_repeats
from stalefront.choice import OptionError
from stalefront.preflight import preflight
from stalefront.session import parse_interval

# Parts of the configuration that no cell sees.
OUTSIDE = ("hydra", "sweep", "run", "slurm")
RUN_OPTIONS = ("checkpoint_every", "keep_checkpoint", "cache_dir")


@dataclass(frozen=True)
class Planned:
    """A cell with the options that change no number, and the overrides it came from.

    Attributes
    ----------
    framework
        Name (`choice`) and options of the framework that the cell's method was written in, None for none. The cell
        holds what they mean, so two ways to say one thing are one cell.
    """

    cell: Cell
    run: Mapping[str, Any]
    overrides: tuple[str, ...]
    framework: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Variant:
    """One composed choice of groups, before plain values are set."""

    node: DictConfig

    @cached_property
    def raw(self) -> dict[str, Any]:
        """Plain form, interpolations and missing values (`???`) as they stand."""
        plain = OmegaConf.to_container(self.node)
        assert isinstance(plain, dict)
        return {str(key): value for key, value in plain.items()}

    @cached_property
    def plain(self) -> dict[str, Any]:
        """Plain form, interpolations resolved."""
        return _resolved(self.node)

    @cached_property
    def interpolates(self) -> bool:
        """True when a value depends on others, so that it has to be resolved a cell."""
        return any(isinstance(value, str) and "${" in value for _, value in leaves(self.raw))

    @cached_property
    def missing(self) -> list[str]:
        """Keys that must be given a value."""
        return [path for path, value in leaves(self.raw) if isinstance(value, str) and value == "???"]

    def has(self, key: str) -> bool:
        """True when `key` names a value (null included) of this configuration."""
        node: Any = self.raw
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return False
            node = node[part]
        return True

    def with_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Plain configuration with `values` set at their dotted keys."""
        for path in self.missing:
            if path not in values:
                raise OptionError(path, "<absent>", "a value: it has no default", f"Give {path}=….")
        if self.interpolates or any(isinstance(v, str) and "${" in v for v in values.values()):
            node = copy.deepcopy(self.node)
            for key, value in values.items():
                OmegaConf.update(node, key, value)
            return _resolved(node)
        config = copy.deepcopy(self.plain)
        for key, value in values.items():
            *parents, leaf = key.split(".")
            part: Any = config
            for name in parents:
                part = part[name]
            part[leaf] = value
        return config


class Composer:
    """Composes cells of one command line.

    Parameters
    ----------
    loader
        Hydra's, with the search path of this application.
    master
        Configuration of the whole command, which carries the overrides of Hydra itself.
    runs_here : bool
        Cells run on this machine, so that its devices are checked.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig, *, runs_here: bool = True) -> None:
        self._loader, self._master, self._runs_here = loader, master, runs_here
        self._parser = OverridesParser.create(config_loader=loader)
        self._parsed: dict[str, Override] = {}
        self._structural: dict[str, bool] = {}
        self._options: dict[str, list[str]] = {}
        self._variants: dict[tuple[str, ...], Variant] = {}

    def parse(self, override: str) -> Override:
        """Parsed override; each distinct text is parsed once."""
        if override not in self._parsed:
            self._parsed[override] = self._parser.parse_overrides([override])[0]
        return self._parsed[override]

    def options(self, group: str) -> list[str]:
        """Choices of a configuration group; empty when there is no such group."""
        # Hydra copies its sources at every question, and every distinct override asks one.
        if group not in self._options:
            self._options[group] = list(self._loader.get_group_options(group))
        return self._options[group]

    def is_structural(self, override: str) -> bool:
        """True when only Hydra can apply the override: a choice of a group, an addition, a deletion, a mapping."""
        if override not in self._structural:
            self._structural[override] = self._needs_hydra(self.parse(override))
        return self._structural[override]

    def _needs_hydra(self, override: Override) -> bool:
        if override.get_key_element() != override.key_or_group or isinstance(override.value(), Mapping):
            return True
        options = self.options(override.key_or_group)
        if options and not isinstance(override.value(), str | list):
            raise OptionError(override.key_or_group, override.value(), f"one of {', '.join(options)}")
        chosen = override.value()
        if options and isinstance(chosen, list):
            # Hydra merges a repeat into its first mention.
            refuse_repeats(override.key_or_group, [str(name) for name in chosen])
            if "none" in chosen and len(chosen) > 1:
                legal = "none alone, or choices without it"
                raise OptionError(override.key_or_group, [str(name) for name in chosen], legal, "Remove none.")
        return bool(options)

    def variant(self, structural: tuple[str, ...]) -> Variant:
        """Configuration composed with these overrides alone."""
        if structural not in self._variants:
            node = self._loader.load_sweep_config(self._master, ["~sweep", *structural])
            self._variants[structural] = Variant(
                OmegaConf.masked_copy(node, [str(key) for key in node if key != "hydra"])
            )
        return self._variants[structural]

    def cell(self, overrides: Sequence[str]) -> Planned:
        """Cell of one list of overrides; raises `OptionError`."""
        variant = self.variant(tuple(text for text in overrides if self.is_structural(text)))
        parsed = [self.parse(text) for text in overrides if not self.is_structural(text)]
        values = {override.key_or_group: override.value() for override in parsed}
        for key in values:
            if not variant.has(key):
                raise unknown_key(key, values[key], [variant])
        config = variant.with_values(values)
        _check_arm([self.parse(text) for text in overrides])
        framework = config.pop("framework", None) or None
        if framework is not None:
            config |= _method_of(framework, [self.parse(text) for text in overrides])
        return Planned(_cell(config), _run_options(config), tuple(overrides), framework)

    def cells(self, jobs: Iterable[Sequence[str]]) -> dict[tuple[str, ...], Planned]:
        """Cell of every list of overrides, composed and checked; lists that give the same cell share one.

        The first problem is raised as `OptionError`, before anything is run or written.
        """
        by_id: dict[str, Planned] = {}
        found: dict[tuple[str, ...], Planned] = {}
        for overrides in jobs:
            planned = self.cell(overrides)
            found[tuple(overrides)] = by_id.setdefault(planned.cell.cell_id, planned)
        preflight([planned.cell for planned in by_id.values()], runs_here=self._runs_here)
        return found


def unknown_key(key: str, value: object, variants: Iterable[Variant], way_out: str = "") -> OptionError:
    """Error about a key that none of `variants` has, with the closest keys they do have unless `way_out` knows more."""
    variants = list(variants)
    if key.startswith("framework."):
        return _unknown_option(key, value, variants)
    known: set[str] = set()
    for variant in variants:
        known |= set(variant.raw) if "." not in key else {path for path, _ in leaves(variant.raw)}
    close = difflib.get_close_matches(key, sorted(known), n=2)
    close = close or sorted(path for path in known if path.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1])[:2]
    hint = f"Did you mean {' or '.join(close)}?" if close else "python sweep.py --cfg job lists them."
    return OptionError(key, value, "a key of the chosen configuration", way_out or hint)


def _unknown_option(key: str, value: object, variants: Iterable[Variant]) -> OptionError:
    from stalefront.frameworks import framework, names

    for variant in variants:
        if name := (variant.raw.get("framework") or {}).get("choice"):
            return framework(name).unknown(key.removeprefix("framework."), value)
    return OptionError(key, value, "an option of a chosen framework", f"Give framework=<one of {', '.join(names())}>.")


def _method_of(options: Mapping[str, Any], overrides: Iterable[Override]) -> dict[str, Any]:
    """Groups of a cell that a framework's options stand for; raises `OptionError` about a second word on them."""
    from stalefront.frameworks import framework
    from stalefront.recipe import DECIDES

    chosen = framework(options["choice"])
    for override in overrides:
        if override.key_or_group.split(".")[0] in DECIDES:
            legal = f"no value beside framework={chosen.name}, which decides {', '.join(DECIDES)}"
            way_out = "Set options of the framework, or leave it out and write the parts: see docs/frameworks.md."
            raise OptionError(override.key_or_group, override.get_value_element_as_str(), legal, way_out)
    return chosen.recipe({key: value for key, value in options.items() if key != "choice"}).config()


# Groups that a choice of the group `arm` may set.
ARM_DECIDES = ("framework", "loss", "correction", "reduction", "proximal", "controller")


def _check_arm(overrides: Iterable[Override]) -> None:
    """Refuse a choice beside a whole method: one of them would be lost, and the cell recorded under the arm's name."""
    chosen = {override.key_or_group: override.value() for override in overrides}
    if chosen.get("arm") in (None, "none"):
        return
    for group in ARM_DECIDES:
        if group in chosen and chosen[group] not in ("none", ["none"]):
            legal = f"no choice beside arm={chosen['arm']}, which is a whole method"
            raise OptionError(
                group, chosen[group], legal, f"Leave out arm or {group}; options such as loss.beta may stay."
            )


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a plain configuration that is no mapping; items of lists one by one."""
    for key, value in node.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}.")
        elif isinstance(value, list):
            for item in value:
                yield path, item
        else:
            yield path, value


def _resolved(node: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


_CELL_KEYS = frozenset(field.name for field in dataclasses.fields(Cell))


def _cell(config: Mapping[str, Any]) -> Cell:
    for key in config.keys() - _CELL_KEYS - set(OUTSIDE):
        raise OptionError(key, config[key], f"one of {', '.join(sorted(_CELL_KEYS))}", "Remove this key.")
    return Cell.from_config(config)


def _run_options(config: Mapping[str, Any]) -> dict[str, Any]:
    run = dict(config.get("run") or {})
    for key in run.keys() - set(RUN_OPTIONS):
        raise OptionError(f"run.{key}", run[key], f"one of {', '.join(RUN_OPTIONS)}", "Remove this key.")
    if type(run["keep_checkpoint"]) is not bool:
        raise OptionError("run.keep_checkpoint", run["keep_checkpoint"], "true or false")
    parse_interval(run["checkpoint_every"])
    return run
