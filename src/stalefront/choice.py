"""One choice of a seam is one frozen dataclass: its fields are its configuration, and it refuses nonsense itself."""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self


class OptionError(ValueError):
    """A configuration that cannot run.

    The message always has four parts: the field, the value given, what is legal, and the way out.
    """

    def __init__(self, field: str, value: object, legal: str, way_out: str = "") -> None:
        self.field = field
        self.value = value
        text = f"{field} = {value!r} is not possible. Legal: {legal}."
        super().__init__(f"{text} {way_out}".strip())


@dataclasses.dataclass(frozen=True)
class Choice:
    """Base of every option that a configuration group offers.

    Subclasses add fields (without defaults: defaults live in `conf/`) and override `check`.
    Values are brought to their declared types before `check` runs, so that `lr=1` and `lr=1.0` are one cell.
    """

    def __post_init__(self) -> None:
        hints = _field_types(type(self))
        for field in dataclasses.fields(self):
            value = settle(hints[field.name], getattr(self, field.name), self.key(field.name))
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Refuse values that have the right type but cannot work."""

    @classmethod
    def group(cls) -> str:
        """Configuration group: the folder this choice's file lies in."""
        parts = cls.__module__.split(".")
        return parts[1] if len(parts) > 2 else ""

    @classmethod
    def choice(cls) -> str:
        """Name of the choice: the stem of its file."""
        return cls.__module__.rsplit(".", 1)[-1]

    @classmethod
    def key(cls, field: str) -> str:
        """Override key of `field`, as a user types it."""
        return ".".join(part for part in (cls.group(), field) if part)

    def require(self, ok: bool, field: str, legal: str, way_out: str = "") -> None:
        """Raise `OptionError` about `field` unless `ok`."""
        if not ok:
            raise OptionError(self.key(field), getattr(self, field), legal, way_out)

    def as_dict(self) -> dict[str, Any]:
        """Plain, JSON-ready mapping; choices of a group carry their name under `choice`."""
        return self._fields(_plain)

    def _fields(self, form: Callable[[Any], Any]) -> dict[str, Any]:
        named = {"choice": self.choice()} if self.group() else {}
        return named | {f.name: form(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def identity(self) -> dict[str, Any]:
        """What the hash of a cell is made from: `as_dict`, unless a field only says where something lies.

        A choice that names files overrides this: what they hold counts, and the path does not.
        """
        return self._fields(_identity)

    def sources(self) -> dict[str, Path]:
        """Files and folders on this machine whose content is part of `identity`, by the field that names them."""
        return {}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping; a missing or unknown key is an `OptionError`."""
        names = [f.name for f in dataclasses.fields(cls)]
        given = {str(k): v for k, v in values.items() if k not in ("choice", "_target_")}
        for key in given.keys() - set(names):
            raise OptionError(cls.key(key), given[key], f"one of {', '.join(names)}", "Remove this key.")
        for key in set(names) - given.keys():
            raise OptionError(cls.key(key), "<absent>", "any value of its type", f"Set {cls.key(key)}=….")
        return cls(**given)


_TYPES: dict[type, dict[str, Any]] = {}


def _field_types(cls: type[Choice]) -> dict[str, Any]:
    """Types of the fields alone: class variables may name things that are imported for type checking only."""
    if cls in _TYPES:
        return _TYPES[cls]
    names = {field.name for field in dataclasses.fields(cls)}
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        own = {k: v for k, v in inspect.get_annotations(base).items() if k in names}
        holder = type(base.__name__, (), {"__annotations__": own, "__module__": base.__module__})
        found |= typing.get_type_hints(holder)
    _TYPES[cls] = found
    return found


def is_count(value: float) -> bool:
    """True for a finite number of at least 1."""
    return math.isfinite(value) and value >= 1


def _plain(value: Any) -> Any:
    if isinstance(value, Choice):
        return value.as_dict()
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return value


def _identity(value: Any) -> Any:
    if isinstance(value, Choice):
        return value.identity()
    if isinstance(value, tuple | list):
        return [_identity(v) for v in value]
    return _plain(value)


def settle(hint: Any, value: Any, path: str) -> Any:
    """Bring `value` to the annotated type `hint`, or raise `OptionError`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return _one_of(args, value, path)
    if origin in (typing.Union, types.UnionType):
        return _settle_union(args, value, path)
    if origin is tuple:
        return _settle_tuple(args, value, path)
    if isinstance(hint, type) and issubclass(hint, Choice) and isinstance(value, Mapping):
        return hint.from_mapping(value)
    if origin is dict or hint is dict:
        return _as_dict(value, path)
    return _settle_scalar(hint, value, path)


def _one_of(options: tuple[Any, ...], value: Any, path: str) -> Any:
    if value not in options:
        raise OptionError(path, value, "one of " + ", ".join(map(str, options)))
    return value


def _settle_union(args: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    rest = [a for a in args if a is not type(None)]
    if type(value) in rest:
        return value
    return settle(rest[0], value, path)


def _settle_tuple(args: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise OptionError(path, value, "a list", "Write it as [a,b].")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(settle(args[0], v, path) for v in value)
    if len(args) != len(value):
        raise OptionError(path, list(value), f"a list of {len(args)}")
    return tuple(settle(a, v, path) for a, v in zip(args, value, strict=True))


def _as_dict(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise OptionError(path, value, "a mapping of names to values")
    return {str(k): _plain(v) for k, v in value.items()}


def _settle_scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if hint is int and type(value) is float and value.is_integer():
        return int(value)
    if hint is Any or type(value) is hint or (isinstance(hint, type) and hint is not int and isinstance(value, hint)):
        return value
    name = getattr(hint, "__name__", str(hint))
    raise OptionError(path, value, f"a value of type {name}", f"{value!r} has type {type(value).__name__}.")
