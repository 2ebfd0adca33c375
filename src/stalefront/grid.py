"""From axes to lists of overrides: the product, less what a chosen variant does not have."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override, Quote, QuotedString

from stalefront.choice import OptionError
from stalefront.compose import Composer, Variant, unknown_key
from stalefront.sweepfiles import NamedSweep


@dataclass(frozen=True)
class Axis:
    """One key and the values it takes; a single value is a fixed override.

    Attributes
    ----------
    key : str
        As typed, a prefix (`+`, `~`) and a package included.
    values : tuple of str
        In Hydra's grammar; None stands for no value (`~key`).
    named : bool
        It comes from the sweep's file, not from the command line.
    """

    key: str
    values: tuple[str | None, ...]
    named: bool

    @property
    def overrides(self) -> list[str]:
        """One override a value."""
        return [self.key if value is None else f"{self.key}={value}" for value in self.values]

    @property
    def base(self) -> str:
        """Key without its prefix."""
        return self.key.lstrip("+~")


def collect_axes(composer: Composer, sweep: NamedSweep, arguments: Sequence[str]) -> list[Axis]:
    """Axes of the named sweep in order, each replaced by the command line's where it has one, then the rest of it."""
    found = {key: Axis(key, _file_values(composer, key, values), True) for key, values in sweep.axes.items()}
    for key, value in sweep.fixed.items():
        if key in found:
            raise OptionError(f"sweep.fixed of {sweep.name}", key, "keys that are not axes too")
        found[key] = Axis(key, (to_grammar(value),), True)
    for argument in arguments:
        axis = _typed_axis(composer.parse(argument))
        if axis.base.split(".")[0] not in ("sweep", "slurm"):
            found[axis.base] = axis
    for axis in found.values():
        if axis.base.startswith("run.") and len(axis.values) > 1:
            legal = "one value: it changes no number, so cells that differ in it alone are one cell"
            raise OptionError(axis.base, ",".join(map(str, axis.values)), legal)
    return list(found.values())


def _file_values(composer: Composer, key: str, values: Any) -> tuple[str | None, ...]:
    if isinstance(values, str):
        return _typed_axis(composer.parse(f"{key}={values}")).values
    return tuple(to_grammar(value) for value in values)


def _typed_axis(override: Override) -> Axis:
    key = override.get_key_element()
    if override.is_discrete_sweep():
        return Axis(key, tuple(dict.fromkeys(override.sweep_string_iterator())), False)
    if override.is_sweep_override():
        way_out = "Give its values, or range(start,stop,step)."
        raise OptionError(key, override.get_value_string(), "values that can be listed", way_out)
    if override.is_delete() and override.value() is None:
        return Axis(key, (None,), False)
    return Axis(key, (override.get_value_element_as_str(),), False)


def to_grammar(value: Any) -> str:
    """A value of a file as text that Hydra reads back as the same value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        is_word = re.fullmatch(r"[A-Za-z_]\w*", value) and value.lower() not in ("null", "true", "false", "inf", "nan")
        return value if is_word else QuotedString(text=value, quote=Quote.single).with_quotes()
    if isinstance(value, list):
        return f"[{','.join(map(to_grammar, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{to_grammar(item)}" for key, item in value.items()) + "}"
    return repr(value)


def expand(axes: Sequence[Axis], composer: Composer, say: Callable[[str], None]) -> list[tuple[str, ...]]:
    """Overrides of every cell: the product of the axes, with those a variant does not have left out of its cells.

    Parameters
    ----------
    say
        Told, once a variant and key, what is left out.

    Raises
    ------
    OptionError
        About a key that no variant of the grid has (and, for a sweep file's, no choice of its group either).
    """
    structural = [axis for axis in axes if any(map(composer.is_structural, axis.overrides))]
    plain = _not_taken_away(axes, structural, say)
    combinations = list(itertools.product(*(axis.overrides for axis in structural)))
    variants = {chosen: composer.variant(chosen) for chosen in combinations}
    for axis in plain:
        if not any(variant.has(axis.key) for variant in variants.values()):
            _check_exists_elsewhere(axis, composer, list(variants.values()))
    jobs: dict[tuple[str, ...], None] = {}
    for chosen, variant in variants.items():
        kept = [axis for axis in plain if variant.has(axis.key)]
        for axis in plain:
            if axis not in kept:
                say(f"{axis.key} is left out {_where(axis, chosen)}: there is no such option there.")
        for values in itertools.product(*(axis.overrides for axis in kept)):
            jobs[chosen + values] = None
    return list(jobs)


def _where(axis: Axis, chosen: tuple[str, ...]) -> str:
    group = axis.key.split(".")[0]
    own = [override for override in chosen if override.lstrip("+~").split("=")[0] == group]
    return f"where {' '.join(own or chosen)}" if chosen else "of every cell"


def _not_taken_away(axes: Sequence[Axis], structural: Sequence[Axis], say: Callable[[str], None]) -> list[Axis]:
    """Plain axes, less those of a sweep file that lie inside what `~key` or `key=null` takes away; typed is refused."""
    away = [axis for axis in axes if axis.key.startswith("~") or axis.values == ("null",)]
    kept = []
    for axis in axes:
        other = next((one for one in away if axis.base.startswith(f"{one.base}.")), None)
        if axis in structural:
            continue
        if other is None:
            kept.append(axis)
        elif axis.named:
            say(f"{axis.key} is left out of every cell: {other.overrides[0]} takes {other.base} away.")
        else:
            legal = f"no value beside {other.overrides[0]}, which takes {other.base} away"
            values = [str(value) for value in axis.values]
            raise OptionError(axis.base, ",".join(values), legal, f"Leave out {other.overrides[0]} or {axis.base}.")
    return kept


def _check_exists_elsewhere(axis: Axis, composer: Composer, variants: list[Variant]) -> None:
    """A sweep file's axis may be one that another choice of its group has; anything else is a mistake."""
    group = axis.key.split(".")[0]
    owners = [f"{group}={option}" for option in composer.options(group)]
    owners = [owner for owner in owners if composer.variant((owner,)).has(axis.key)]
    if axis.named and owners:
        return
    way_out = f"It exists with {' or '.join(owners)}." if owners else ""
    values = [composer.parse(override).value() for override in axis.overrides]
    raise unknown_key(axis.key, values[0] if len(values) == 1 else values, variants, way_out)
