"""Named sweeps: `sweeps/NAME.yaml` is the choice `sweep=NAME`, from any working directory."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from stalefront.choice import OptionError

KEYS = ("name", "question", "axes", "fixed", "cost")


@dataclass(frozen=True)
class NamedSweep:
    """A sweep file.

    Attributes
    ----------
    axes : mapping
        Override key → list of values, or a sweep in Hydra's grammar such as `range(0,4)`.
    fixed : mapping
        Override key → the one value every cell has.
    cost : str
        What to expect, for a human.
    """

    name: str
    question: str
    axes: Mapping[str, Any]
    fixed: Mapping[str, Any]
    cost: str

    @classmethod
    def from_config(cls, config: Any) -> NamedSweep:
        """Sweep of the composed group `sweep`; None is the sweep without axes."""
        if config is None:
            return cls("grid", "", {}, {}, "")
        plain = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
        if not isinstance(plain, Mapping):
            raise OptionError("sweep", plain, "the name of a file in sweeps/, or null")
        name = str(plain.get("name"))
        for key in {str(key) for key in plain} - set(KEYS):
            raise OptionError(f"sweep.{key}", plain[key], f"one of {', '.join(KEYS)}", f"See the file of sweep={name}.")
        axes, fixed = plain.get("axes") or {}, plain.get("fixed") or {}
        for field, value in (("axes", axes), ("fixed", fixed)):
            if not isinstance(value, Mapping):
                raise OptionError(f"sweep.{field}", value, "a mapping from override keys", f"See sweep={name}.")
        for key, values in axes.items():
            if not isinstance(values, str) and not (isinstance(values, list) and values):
                raise OptionError(f"sweep.axes of {name}, {key}", values, "a list of values, or text like range(0,4)")
        return cls(name, str(plain.get("question") or ""), axes, fixed, str(plain.get("cost") or ""))


def register_sweeps(folder: Path | None = None) -> None:
    """Make every sweep file of this package and of `folder` (default: `./sweeps`) a choice of the group `sweep`.

    A file of `folder` that has the name of another one but not its content is an `OptionError`.
    """
    packaged = importlib.resources.files("stalefront.sweeps")
    with importlib.resources.as_file(packaged) as here:
        for path in sorted(here.glob("*.yaml")):
            _register(path)
    for path in sorted((folder or Path("sweeps")).glob("*.yaml")):
        _register(path)


def _register(path: Path) -> None:
    try:
        config = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException) as error:
        raise OptionError(str(path), "<unreadable>", "a YAML file", str(error)) from error
    if not isinstance(config, DictConfig):
        raise OptionError(str(path), "<a list>", f"a mapping with the keys {', '.join(KEYS)}")
    if config.get("name") is None:
        config["name"] = path.stem
    known = registered().get(path.stem)
    if known is not None and known != config:
        way_out = "Another sweep file has this name: give yours a name of its own."
        raise OptionError(f"sweep={path.stem}", str(path), "a name that is not taken", way_out)
    ConfigStore.instance().store(group="sweep", name=path.stem, node=config, provider="stalefront.sweeps")


def registered() -> dict[str, DictConfig]:
    """Choices of the group `sweep` so far, by name."""
    found = ConfigStore.instance().repo.get("sweep", {})
    return {name.removesuffix(".yaml"): node.node for name, node in found.items()}
