"""Frozen trees: whole, importable before anything else, one a code, and never half of one."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from pathlib import Path

import pytest

import stalefront.freeze as module
from stalefront.choice import OptionError
from stalefront.freeze import (
    MAPPED,
    Frozen,
    code_version,
    digest_of,
    freeze,
    freeze_modules,
    import_first,
    package_files,
)

ROOT = Path(__file__).parents[1]
LOOK = """
import importlib.metadata, json, sys
import stalefront, stalefront.analysis, stalefront.conf, stalefront.sweeps, stalefront.task
import hydra_plugins.stalefront_launcher, hydra_plugins.stalefront_sweeper
from importlib.resources import files
from stalefront import freeze
print(json.dumps({
    "files": sorted({m.__file__ for n, m in sys.modules.items() if n.startswith(("stalefront", "hydra_plugins.st"))}),
    "data": str(files("stalefront.task") / "data" / "additions.jsonl"),
    "code": freeze.code_version(),
    "version": freeze.package_version(),
    "metadata": next((d.version for d in importlib.metadata.distributions(name="stalefront")), None),
    "again": freeze.freeze(__import__("pathlib").Path(sys.argv[1])).digest,
}))
"""
ONE = "import sys, pathlib; from stalefront.freeze import freeze; print(freeze(pathlib.Path(sys.argv[1])).path)"
# Waits for its start, so that several freeze at the same moment.
RACER = f"""
import sys, time, pathlib
import stalefront.freeze
pathlib.Path(sys.argv[1], f"ready{{sys.argv[2]}}").touch()
while not pathlib.Path(sys.argv[1], "go").exists():
    pass
{ONE}
"""


@pytest.fixture(scope="module")
def frozen(tmp_path_factory) -> Frozen:
    return freeze(tmp_path_factory.mktemp("code"))


def look(frozen: Frozen, cwd: Path, python: str = sys.executable, **env: str) -> dict:
    arguments = [python, "-W", "error", "-c", LOOK, str(frozen.path.parent)]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(arguments, cwd=cwd, env=clean | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names(frozen: Frozen) -> set[str]:
    return {str(p.relative_to(frozen.path)) for p in frozen.path.rglob("*") if p.is_file() and p.suffix != ".pyc"}


def test_every_mapped_package_is_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(project["package-dir"]) - {"stalefront"} <= set(MAPPED)


def test_the_tree_is_whole(frozen):
    found = names(frozen)
    expected = set()
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    for package, folder in folders.items():
        files = [p for kind in ("*.py", "*.yaml", "*.j2", "*.css", "*.jsonl") for p in (ROOT / folder).rglob(kind)]
        expected |= {f"{package.replace('.', '/')}/{p.relative_to(ROOT / folder)}" for p in files}
    assert expected
    assert expected <= found
    assert {"stalefront/py.typed", "stalefront/task/data/additions.jsonl", "stalefront/conf/config.yaml"} <= found
    assert "hydra_plugins/__init__.py" not in found
    assert not [name for name in package_files() if "__pycache__" in name or name.endswith(".pyc")]


def test_the_record(frozen):
    record = json.loads((frozen.path / "frozen.json").read_text())
    assert set(record) == {"format", "digest", "commit", "dirty", "version", "created_utc"}
    assert (record["format"], record["digest"], record["version"]) == (1, frozen.digest, module.package_version())
    assert {"commit": record["commit"], "dirty": record["dirty"]} == code_version()
    assert frozen.path.name == frozen.digest
    assert (frozen.path / "uncommitted.diff").exists() == bool(frozen.dirty)


@pytest.mark.parametrize("where", ["elsewhere", "src", "checkout", "conf"])
def test_it_wins_over_an_editable_install_in_any_working_directory(frozen, tmp_path, where):
    cwd = {"elsewhere": tmp_path, "src": ROOT / "src", "checkout": ROOT, "conf": ROOT / "conf"}[where]
    seen = look(frozen, cwd, **import_first([frozen.path]))
    assert all(Path(file).is_relative_to(frozen.path) for file in [*seen["files"], seen["data"]])
    assert seen["code"] == {"commit": frozen.commit, "dirty": frozen.dirty}
    assert seen["version"] == seen["metadata"] == module.package_version()
    assert seen["again"] == frozen.digest


def test_it_wins_over_site_packages_and_a_wheel_freezes_alike(frozen, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = str(home / "bin" / "python")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    for package in ("stalefront", "hydra_plugins"):
        shutil.copytree(frozen.path / package, site / package)
    installed = look(Frozen(tmp_path / "other" / "x", "", None, None), tmp_path, python)
    assert all(Path(file).is_relative_to(site) for file in installed["files"])
    assert installed["code"] == {"commit": None, "dirty": None}
    assert (installed["version"], installed["metadata"]) == ("unknown", None)
    assert installed["again"] == frozen.digest
    seen = look(frozen, tmp_path, python, **import_first([frozen.path]))
    assert all(Path(file).is_relative_to(frozen.path) for file in [*seen["files"], seen["data"]])
    assert seen["version"] == module.package_version()


def test_a_checkout_around_the_tree_is_not_asked(frozen, tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    shutil.copytree(frozen.path, tmp_path / "code" / frozen.digest)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    moved = Frozen(tmp_path / "code" / frozen.digest, frozen.digest, frozen.commit, frozen.dirty)
    seen = look(moved, tmp_path, **import_first([moved.path]))
    assert seen["code"] == {"commit": frozen.commit, "dirty": frozen.dirty}


def test_a_path_that_cannot_stand_in_a_list_of_paths(frozen):
    assert import_first([frozen.path, "/b"]) == {"PYTHONPATH": f"{frozen.path}:/b", "PYTHONSAFEPATH": "1"}
    with pytest.raises(OptionError, match=r"hydra\.sweep\.dir"):
        import_first(["/a:b"])


def test_the_same_code_is_copied_once(tmp_path):
    first = freeze(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert freeze(tmp_path) == first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_other_code_lies_beside_it(tmp_path, monkeypatch):
    first = freeze(tmp_path / "code")
    extra = tmp_path / "more.py"
    extra.write_text("")
    monkeypatch.setattr(module, "package_files", lambda: package_files() | {"stalefront/loss/more.py": extra})
    second = freeze(tmp_path / "code")
    assert second.digest != first.digest
    assert names(second) - names(first) == {"stalefront/loss/more.py"}
    assert sorted(p.name for p in (tmp_path / "code").iterdir()) == sorted([first.digest, second.digest])


def test_the_digest_tells_names_and_contents_apart():
    digests = [digest_of(files) for files in ({"a": b"b"}, {"ab": b""}, {"a": b"", "b": b""}, {"a": b"c"}, {})]
    assert len(set(digests)) == 5
    assert digest_of({"a": b"1", "b": b"2"}) == digest_of({"b": b"2", "a": b"1"})


def test_a_kill_leaves_nothing_that_counts(tmp_path, monkeypatch):
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", kill)
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            freeze(tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".")
    frozen = freeze(tmp_path)
    assert left.exists()
    assert {p.name for p in tmp_path.iterdir()} == {left.name, frozen.digest}
    assert names(frozen) >= set(package_files())


def test_launchers_at_the_same_moment_share_one_tree(tmp_path):
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(4)
    ]
    while len(list(tmp_path.glob("ready*"))) < 4:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    printed = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0] * 4
    (path,) = printed
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {Path(path).name}


def test_a_checkout_is_dirty_by_what_runs(tmp_path, monkeypatch):
    """A changed tracked file and an untracked file of the package count; an untracked note beside it does not."""
    package = tmp_path / "src" / "stalefront"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    monkeypatch.setattr(module, "__file__", str(package / "freeze.py"))
    monkeypatch.setattr(module, "package_folders", lambda: [("stalefront", package)])

    def state() -> tuple[object, object, bytes | None]:
        found, diff = module._state(with_diff=True)
        return found["commit"] is not None, found["dirty"], diff

    assert state() == (False, None, None)
    subprocess.run([*git, "init", "-q"], check=True)
    assert state() == (False, None, None)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    (tmp_path / "note").write_text("")
    assert state() == (True, False, None)
    (package / "loss.py").write_text("")
    assert state() == (True, True, b"")
    (package / "loss.py").unlink()
    (package / "__init__.py").write_bytes(b"a = '\xe9'\n")
    commit, dirty, diff = state()
    assert (commit, dirty) == (True, True)
    assert diff.endswith(b"+a = '\xe9'\n")


def test_a_users_modules_are_copied_and_installed_ones_are_not(tmp_path, monkeypatch):
    (tmp_path / "own_reward.py").write_text("def f(*_): return [1.0]\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package/__init__.py").write_text("")
    (tmp_path / "own_package/deep.py").write_text("def f(*_): return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "code"
    names = ["own_reward", "own_package.deep", "json", "numpy", "stalefront.task.file", "nowhere"]
    copied = freeze_modules(folder, names)
    found = sorted(str(path.relative_to(copied)) for path in copied.rglob("*.py"))
    assert found == ["own_package/__init__.py", "own_package/deep.py", "own_reward.py"]
    assert freeze_modules(folder, names) == copied
    (tmp_path / "own_reward.py").write_text("def f(*_): return [0.0]\n")
    assert freeze_modules(folder, names) != copied
    assert freeze_modules(folder, ["json", "numpy"]) is None
