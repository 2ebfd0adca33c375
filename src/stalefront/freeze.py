"""Freezes the code of this package into a sweep directory: a job that waits for days must not meet tomorrow's code.

A frozen tree is one importable folder, whatever the layout it was taken from (a checkout, an editable installation, a
wheel). First on the path it wins over any of them.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import pkgutil
import shutil
import subprocess
import sysconfig
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stalefront.choice import OptionError
from stalefront.files import read_json

PACKAGE = "stalefront"
PLUGINS = "hydra_plugins"
RECORD, DIFF = "frozen.json", "uncommitted.diff"
# Packages that an editable installation maps by name: no walk along a folder finds them. Where each lies is asked of
# the import system, and one that it cannot find cannot be imported by the running code either.
MAPPED = (
    *("stalefront.analysis", "stalefront.conf", "stalefront.slurm", "stalefront.sweeps"),
    *("hydra_plugins.stalefront_launcher", "hydra_plugins.stalefront_sweeper"),
)


@dataclass(frozen=True)
class Frozen:
    """A frozen tree.

    Attributes
    ----------
    path : Path
        Absolute; the folder that goes on the path.
    digest : str
        Twelve hex digits of the names and contents of its files, and the folder's name.
    commit, dirty
        Of the checkout that the code was first frozen from, None outside of one (see `code_version`).
    """

    path: Path
    digest: str
    commit: str | None
    dirty: bool | None


def import_first(folders: Sequence[Path | str]) -> dict[str, str]:
    """Variables with which a Python process imports from `folders` before anything else.

    The safe path keeps the working directory (`-m`, `-c`) and a script's folder out of the way: both would come
    before `PYTHONPATH`.
    """
    for folder in folders:
        if os.pathsep in str(folder):
            legal, way_out = f"a path without {os.pathsep!r}", "Choose another sweep directory."
            raise OptionError("hydra.sweep.dir", str(folder), legal, way_out)
    return {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONSAFEPATH": "1"}


def freeze(folder: Path) -> Frozen:
    """Copy the running package to `folder/<digest>`, unless this very code is there already.

    The tree is written under a temporary name and renamed: a kill leaves a hidden folder that nobody looks at, and
    of two launchers at the same moment the second one takes the tree of the first.
    """
    contents = {name: path.read_bytes() for name, path in sorted(package_files().items())}
    digest = digest_of(contents)
    target = folder.absolute() / digest
    record = read_json(target / RECORD)
    if record is None:
        _write(target, contents, digest)
        record = read_json(target / RECORD)
    return Frozen(target, digest, record["commit"], record["dirty"])


def freeze_modules(folder: Path, names: Iterable[str]) -> Path | None:
    """Copy a user's own modules (reward functions) to `folder/user-<digest>`; None when there is none to copy.

    A module counts as the user's own when it is imported from outside the installation: beside the data, that is. The
    whole top-level package goes along; what else it reads at run time does not.
    """
    contents: dict[str, bytes] = {}
    for name in sorted({name.partition(".")[0] for name in names}):
        spec = find_spec(name)
        if spec is None or spec.origin is None or _is_installed(Path(spec.origin)):
            continue
        if spec.submodule_search_locations:
            root = Path(next(iter(spec.submodule_search_locations)))
            contents |= {f"{name}/{path.relative_to(root)}": path.read_bytes() for path in _files_below(root)}
        else:
            contents[Path(spec.origin).name] = Path(spec.origin).read_bytes()
    if not contents:
        return None
    target = folder.absolute() / f"user-{digest_of(contents)}"
    if not target.is_dir():
        _write_tree(target, contents, {})
    return target


def _is_installed(origin: Path) -> bool:
    """True for a file of Python itself, of an installed package, or of this package."""
    installed = [*sysconfig.get_paths().values(), *(str(path) for _, path in package_folders())]
    return any(origin.is_relative_to(path) for path in installed) or not origin.is_file()


def digest_of(contents: Mapping[str, bytes]) -> str:
    """Twelve hex digits of the SHA-256 over names and contents, in the order of the names."""
    found = hashlib.sha256()
    for name, content in sorted(contents.items()):
        found.update(json.dumps([name, len(content)]).encode())
        found.update(content)
    return found.hexdigest()[:12]


def package_files() -> dict[str, Path]:
    """Every file of the running package and of its Hydra plugins: name in a frozen tree → where it lies now.

    All that lies in a package's folder counts, tracked by git or not: an untracked loss file is part of what runs.
    Only byte code and hidden files (of editors) are left out.
    """
    found: dict[str, Path] = {}
    for package, folder in package_folders():
        for path in _files_below(folder):
            name = "/".join((*package.split("."), *path.relative_to(folder).parts))
            found.setdefault(name, path)
    return found


def package_folders() -> Iterator[tuple[str, Path]]:
    """Packages and the folders that hold all their files, as the import system knows them; `stalefront` comes first."""
    names = [PACKAGE, *(name for name in MAPPED if name.startswith(f"{PACKAGE}."))]
    plugins = find_spec(PLUGINS)
    if plugins is not None:
        walked = pkgutil.iter_modules(plugins.submodule_search_locations, f"{PLUGINS}.")
        found = [info.name for info in walked if info.name.startswith(f"{PLUGINS}.{PACKAGE}_")]
        names += dict.fromkeys([*(name for name in MAPPED if name.startswith(f"{PLUGINS}.")), *found])
    for name in names:
        spec = find_spec(name)
        for location in (spec and spec.submodule_search_locations) or []:
            yield name, Path(location)


def _files_below(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        yield from (Path(root, name) for name in names if not name.startswith(".") and not name.endswith(".pyc"))


def _write(target: Path, contents: Mapping[str, bytes], digest: str) -> None:
    state, diff = _state(with_diff=True)
    record = {
        "format": 1,
        "digest": digest,
        **state,
        "version": package_version(),
        "created_utc": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    extra = {RECORD: (json.dumps(record, indent=1) + "\n").encode(), **({} if diff is None else {DIFF: diff})}
    _write_tree(target, contents, extra)


def _write_tree(target: Path, contents: Mapping[str, bytes], extra: Mapping[str, bytes]) -> None:
    """Write files under a temporary name and rename the whole; `extra` may be edited later, `contents` may not."""
    tmp = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        for name, content in {**contents, **extra}.items():
            path = tmp / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if name in contents:
                # An edit here would change what runs behind the digest's back.
                path.chmod(0o444)
        try:
            tmp.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


@lru_cache(maxsize=1)
def code_version() -> dict[str, Any]:
    """Commit of the code that runs, and whether that commit is not all of it; null outside a checkout.

    In a frozen tree it is what was frozen: the tree may lie inside a checkout whose state is another. A checkout is
    dirty when a tracked file differs from the commit, or when a file of this package is neither tracked nor ignored.
    """
    return _state(with_diff=False)[0]


def package_version() -> str:
    """Version of the package that runs: a frozen tree's own, otherwise that of the installation; `unknown` if neither.

    Beside a frozen tree the installation may have moved on to another version.
    """
    record = frozen_record()
    if record is not None:
        return str(record["version"])
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def frozen_record() -> dict[str, Any] | None:
    """`frozen.json` of the tree that this module runs from; None outside a frozen tree."""
    record: dict[str, Any] | None = read_json(Path(__file__).parents[1] / RECORD)
    return record


def _state(*, with_diff: bool) -> tuple[dict[str, Any], bytes | None]:
    """Commit and dirty, and the uncommitted changes of tracked files if there are any and they are asked for."""
    record = frozen_record()
    if record is not None:
        diff = Path(__file__).parents[1] / DIFF
        state = {"commit": record["commit"], "dirty": record["dirty"]}
        return state, diff.read_bytes() if with_diff and diff.is_file() else None
    # A folder that git does not track, such as a virtual environment inside a checkout, is outside of it.
    commit = _git("rev-parse", "HEAD") if _git("ls-files", "--", "__init__.py") else None
    if commit is None:
        return {"commit": None, "dirty": None}, None
    folders = [str(folder) for package, folder in package_folders()]
    changed = _git("status", "--porcelain", "--untracked-files=no")
    added = _git("ls-files", "--others", "--exclude-standard", "--", *folders)
    state = {"commit": commit.decode().strip(), "dirty": bool(changed or added)}
    diff_wanted = with_diff and state["dirty"]
    return state, _git("diff", "--no-color", "--no-ext-diff", "--binary", "HEAD") if diff_wanted else None


def _git(*arguments: str) -> bytes | None:
    """What git prints about the checkout that this file lies in; None where it fails or there is no git."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
