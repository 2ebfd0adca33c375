"""The tree keeps its promises: every package ships, stems agree, and links in the documents lead somewhere."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
# Groups whose choices are methods: one file each, with one configuration and one test of the same stem.
METHODS = ("delay", "loss", "proximal", "correction", "controller", "engine", "mismatch")

# Groups that are lists, with a configuration for the empty one.
LISTS = ("mismatch", "correction", "controller")


def on_disk() -> set[str]:
    roots = {f"stalefront.{folder}": folder for folder in ("analysis", "conf", "slurm", "sweeps")}
    roots |= {"stalefront": "src/stalefront", "hydra_plugins": "src/hydra_plugins"}
    found = set()
    for package, folder in roots.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *parts)))
    return found


def test_every_package_is_in_the_wheel():
    assert set(PROJECT["packages"]) == on_disk()


def test_data_folders_are_in_the_wheel():
    assert list((ROOT / "src/stalefront/task/data").glob("*.jsonl"))
    assert "data/*.jsonl" in PROJECT["package-data"]["stalefront.task"]


@pytest.mark.parametrize("group", METHODS)
def test_a_choice_has_the_same_stem_in_three_places(group):
    code = {p.stem for p in (ROOT / "src/stalefront" / group).glob("[!_]*.py")}
    conf = {p.stem for p in (ROOT / "conf" / group).glob("*.yaml")} - ({"none"} if group in LISTS else set())
    tests = {p.stem.removeprefix("test_") for p in (ROOT / "tests" / group).glob("test_*.py")}
    assert code == conf
    assert code <= tests


def test_links_in_documents_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_functions_and_files_stay_within_their_budget():
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "analysis").rglob("*.py")]:
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert code_lines(node, lines) <= 60, f"{path}: {node.name}"


def code_lines(node: ast.FunctionDef, lines: list[str]) -> int:
    """Lines of a function without blanks, comments and its docstring."""
    body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
    kept = lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[body[0].lineno - 1 : node.end_lineno]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in kept)
