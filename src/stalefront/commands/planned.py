"""The cells of a sweep directory as its plan names them, and finding one by what a user types."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stalefront.choice import OptionError
from stalefront.files import read_json
from stalefront.labels import only, staleness, varying
from stalefront.paths import SweepPaths

# Candidates that an error names; the others are counted.
MAX_NAMED = 8
# Keys that have a column of their own under a short name, which may be typed too.
SHORT = {"S": "delay.S", "lr": "optimizer.lr", "seed": "seed"}
SHOWN_BY_NAME = {*SHORT.values(), "delay.lag_updates"}


@dataclass(frozen=True)
class Sweep:
    """Content of `plan.json`.

    Attributes
    ----------
    cells : mapping
        Cell id → `{"overrides": […], "cell": {…}}`, in the order they were planned.
    """

    paths: SweepPaths
    name: str
    question: str
    axes: Mapping[str, Sequence[Any]]
    cells: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, directory: Path) -> Sweep:
        """Sweep in `directory`; raises `OptionError` where there is none."""
        paths = SweepPaths(directory.absolute())
        try:
            plan = read_json(paths.plan)
        except (NotADirectoryError, json.JSONDecodeError) as error:
            raise OptionError(str(paths.plan), "<unreadable>", "a plan", str(error)) from error
        if plan is None:
            way_out = "Give the folder that python sweep.py wrote, for example runs/default."
            raise OptionError("DIR", str(directory), "a sweep directory: a folder with a plan.json", way_out)
        about = plan.get("sweep") or {}
        name = str(about.get("name") or directory.name)
        return cls(paths, name, str(about.get("question") or ""), about.get("axes") or {}, plan.get("cells") or {})

    @cached_property
    def varying(self) -> set[str]:
        """Override keys that tell one cell from another."""
        return varying([entry["overrides"] for entry in self.cells.values()])

    def label(self, cell_id: str) -> str:
        """Id and what varies."""
        return " ".join([cell_id, *only(self.varying, self.cells[cell_id]["overrides"])])

    def find(self, text: str) -> str:
        """Id of the one cell that `text` means: an id, the start of one, or overrides; raises `OptionError`."""
        words = text.split()
        if text in self.cells:
            return text
        if words and all("=" in word for word in words):
            found = [cell_id for cell_id, entry in self.cells.items() if all(fits(entry, word) for word in words)]
        elif re.fullmatch(r"[0-9a-f]+", text):
            found = [cell_id for cell_id in self.cells if cell_id.startswith(text)]
        else:
            found = []
        if len(found) != 1:
            raise OptionError("CELL", text, "a text that fits exactly one cell of this sweep", self._candidates(found))
        return found[0]

    def _candidates(self, found: Sequence[str]) -> str:
        if not found:
            where = self.paths.root
            return (
                "Give its id, the start of it, or settings in one argument, as in 'delay.S=4 optimizer.lr=0.001'; "
                f"stalefront status {where} lists them."
            )
        lines = [f"  {self.label(cell_id)}" for cell_id in found[:MAX_NAMED]]
        lines += [f"  … and {len(found) - MAX_NAMED} more"] if len(found) > MAX_NAMED else []
        return "\n".join([f"It fits {len(found)}:", *lines])


def fits(entry: Mapping[str, Any], override: str) -> bool:
    """True when a planned cell has this setting, whether it was given for it or is a default."""
    key, _, wanted = override.partition("=")
    key = bare(key)
    if key == "S":
        return same(_text(staleness(entry["cell"])), wanted)
    key = SHORT.get(key, key)
    given = [text.partition("=") for text in entry["overrides"]]
    values = [value for name, _, value in given if bare(name) == key]
    return any(same(value, wanted) for value in [*values, _text(_at(entry["cell"], key))])


def bare(key: str) -> str:
    """An override's key without Hydra's marks for additions, deletions and packages."""
    return key.lstrip("+~").partition("@")[0]


def same(found: str, wanted: str) -> bool:
    """True for equal texts, and for texts that are one number: 1e-3 and 0.001."""
    if found == wanted:
        return True
    try:
        return float(found) == float(wanted)
    except ValueError:
        return False


def _at(cell: Mapping[str, Any], key: str) -> Any:
    """Value at a dotted key of a recorded cell; of a group, its choice."""
    node: Any = cell
    for part in key.split("."):
        node = node.get(part, "") if isinstance(node, Mapping) else ""
    if isinstance(node, Mapping):
        return node.get("choice", "")
    if isinstance(node, list) and all(isinstance(item, Mapping) for item in node):
        return "[" + ",".join(str(item.get("choice")) for item in node) + "]"
    return node


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
