"""`stalefront import-config`: another framework's configuration file as overrides of ours."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalefront.choice import OptionError
from stalefront.frameworks import Framework, flatten, framework
from stalefront.recipe import Recipe

# Axes of a sweep file written for an imported configuration: those of the default sweep.
AXES = {"delay.S": [1, 4, 16, 64], "optimizer.lr": [1.25e-4, 2.5e-4, 5.0e-4, 1.0e-3, 2.0e-3]}


@dataclass(frozen=True)
class Imported:
    """What a configuration file says about the algorithm.

    Attributes
    ----------
    options
        By the framework's name of them, as far as the file has them.
    ignored
        Dotted keys of the file that concern other parts.
    """

    framework: Framework
    options: Mapping[str, Any]
    ignored: tuple[str, ...]

    @property
    def recipe(self) -> Recipe:
        """What the options mean; raises `OptionError`."""
        return self.framework.recipe(self.options)

    @property
    def changed(self) -> dict[str, Any]:
        """Options that differ from the framework's defaults."""
        usual = self.framework.defaults()
        given = self.framework.read(self.options)
        return {name: value for name, value in given.items() if value != _tuple(usual[name])}

    @property
    def overrides(self) -> list[str]:
        """The same in Hydra's grammar."""
        from stalefront.grid import to_grammar

        told = [f"framework.{name}={to_grammar(_list(value))}" for name, value in self.changed.items()]
        return [f"framework={self.framework.name}", *told]


def import_config(name: str, path: Path, *, sweep: str | None = None) -> int:
    """Print the overrides that a configuration file stands for, and the recipe behind them; returns the exit code."""
    found = read_config(framework(name), path)
    recipe = found.recipe
    target = None if sweep is None else write_sweep(found, sweep, path)
    print(shell(found.overrides))
    print(f"# written out: {shell(recipe.overrides())}")
    for note in recipe.notes:
        print(f"# note: {note}")
    if any(one.get("anchor") == "old/mu" for one in recipe.correction):
        print("# note: corrections on old/mu act where sampler and trainer differ; a cell without that refuses them")
    places = _places(found.framework)
    counts = Counter(_part(key, places) for key in found.ignored)
    for part, count in sorted(counts.items()):
        print(f"# ignored, it concerns other parts: {part}" + (f" ({count} keys)" if count > 1 else ""))
    if target is not None:
        print(f"# written: {target}; run it with python sweep.py -m sweep={sweep}")
    return 0


def read_config(chosen: Framework, path: Path) -> Imported:
    """Take the options of `chosen` from wherever it keeps them; raises `OptionError`."""
    places = _places(chosen)
    options: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in flatten(_load(path), places):
        name = places.get(key)
        if name is None:
            _refuse_in_section(chosen, key, value)
            ignored.append(key)
        elif name in options and options[name] != value:
            legal = f"{options[name]!r}, as elsewhere in this file"
            raise OptionError(f"{path}: {key}", value, legal, f"Both stand for {chosen.name}'s {name}.")
        else:
            options[name] = value
    if not options:
        legal = f"a file with options of {chosen.name}, such as {', '.join(sorted(places)[:3])}"
        raise OptionError(str(path), "<none of them>", legal, f"docs/frameworks.md lists where {chosen.name} has them.")
    return Imported(chosen, options, tuple(ignored))


def write_sweep(found: Imported, name: str, source: Path) -> Path:
    """`sweeps/NAME.yaml` over the default axes, which never replaces a file."""
    import yaml

    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise OptionError("--sweep", name, "a name of letters, digits, - and _")
    target = Path("sweeps") / f"{name}.yaml"
    if target.exists():
        raise OptionError("--sweep", name, "the name of a file that is not there yet", f"{target} exists.")
    fixed = {"framework": found.framework.name}
    fixed |= {f"framework.{key}": _list(value) for key, value in found.changed.items()}
    content = {
        "name": name,
        "question": f"At which staleness and learning rate does the recipe of {source.name} still learn?",
        "axes": AXES,
        "fixed": fixed,
    }
    target.parent.mkdir(exist_ok=True)
    target.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return target


def shell(overrides: list[str]) -> str:
    """Overrides as a shell takes them: what Hydra wants in single quotes stands in double ones."""
    import shlex

    return " ".join(
        f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text) for text in overrides
    )


def _places(chosen: Framework) -> dict[str, str]:
    """Dotted key of the framework's configuration → name of the option."""
    found: dict[str, str] = {}
    for table in (chosen.options, chosen.not_shared):
        for name, option in table.items():
            found |= dict.fromkeys((name,) if option.paths is None else option.paths, name)
    return found


def _refuse_in_section(chosen: Framework, key: str, value: Any) -> None:
    section = next((one for one in chosen.sections if key == one or key.startswith(f"{one}.")), None)
    # A whole section that is null says nothing.
    if section is None or (key == section and value is None) or key.rsplit(".", 1)[-1] == "_target_":
        return
    known = sorted(place for place in _places(chosen) if place.startswith(f"{section}."))
    close = difflib.get_close_matches(key, known, n=2, cutoff=0.8)
    way_out = f"Did you mean {' or '.join(close)}?" if close else "It has no counterpart: remove it from the file."
    raise OptionError(key, value, f"one of {', '.join(known)}", way_out)


def _part(key: str, places: Mapping[str, str]) -> str:
    """What a key is reported under: the top of its tree, or the two topmost where options stand in the same tree."""
    top = key.split(".")[0]
    shared = any(place.startswith(f"{top}.") for place in places)
    return ".".join(key.split(".")[:2]) if shared else top


def _load(path: Path) -> dict[str, Any]:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        node = OmegaConf.load(path)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise OptionError(str(path), "<unreadable>", "a YAML file", str(error)) from error
    if not isinstance(node, DictConfig):
        raise OptionError(str(path), "<a list>", "a mapping of options")
    plain = OmegaConf.to_container(node)
    assert isinstance(plain, dict)
    return {str(key): _resolved(node, str(key), value) for key, value in plain.items()}


def _resolved(node: Any, key: str, value: Any) -> Any:
    """A value with its interpolations resolved as far as the file itself can; other resolvers are left as text."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(value, dict):
        return {str(name): _resolved(node, f"{key}.{name}", inner) for name, inner in value.items()}
    if not (isinstance(value, str) and "${" in value):
        return value
    try:
        return OmegaConf.select(node, key, default=value)
    except OmegaConfBaseException:
        return value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
