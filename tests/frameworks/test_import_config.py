"""`stalefront import-config`: another framework's file as overrides of ours."""

import pytest
import yaml

from stalefront.cli import main
from stalefront.commands.import_config import read_config
from stalefront.frameworks import framework

CONFIG = """
data: {train_files: x, max_prompt_length: 512}
algorithm:
  adv_estimator: grpo
  gamma: 1.0
  rollout_correction: {rollout_is: token, rollout_is_threshold: 0.5_5.0, bypass_mode: true, loss_type: reinforce}
actor_rollout_ref:
  actor:
    clip_ratio_low: 0.1
    clip_ratio_high: ${actor_rollout_ref.actor.clip_ratio_low}
    entropy_coeff: 0
    optim: {lr: 1e-6, clip_grad: "${oc.env:NOBODY_SETS_THIS}"}
    policy_loss: {_target_: verl.workers.config.PolicyLossConfig, loss_mode: vanilla}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(old="", new=""):
        assert old in CONFIG
        (tmp_path / "verl.yaml").write_text(CONFIG.replace(old, new) if old else CONFIG)
        return tmp_path / "verl.yaml"

    return write


def run(*arguments):
    return main(["import-config", "--framework", "verl", *map(str, arguments)])


def test_overrides_recipe_and_what_was_ignored(config, capsys):
    assert run(config()) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first == (
        "framework=verl framework.clip_ratio_low=0.1 framework.clip_ratio_high=0.1 framework.rollout_is=token "
        "\"framework.rollout_is_threshold='0.5_5.0'\" framework.bypass_mode=true framework.loss_type=reinforce"
    )
    assert second.startswith("# written out: loss=reinforce ")
    assert "'correction=[icepop]'" in second
    ignored = [line for line in rest if "ignored" in line]
    assert ignored == [
        "# ignored, it concerns other parts: actor_rollout_ref.actor (3 keys)",
        "# ignored, it concerns other parts: algorithm.gamma",
        "# ignored, it concerns other parts: data (2 keys)",
    ]
    assert any("trainer_version=v1" in line for line in rest if "# note" in line)


def test_corrections_on_the_mismatch_alone_are_pointed_out(config, capsys):
    assert run(config("bypass_mode: true", "bypass_mode: false")) == 0
    assert "# note: corrections on old/mu act where" in capsys.readouterr().out


def test_a_sweep_is_written_once(config, capsys):
    path = config()
    assert run(path, "--sweep", "mine") == 0
    stored = yaml.safe_load((path.parent / "sweeps" / "mine.yaml").read_text())
    assert stored["fixed"]["framework"] == "verl"
    assert stored["fixed"]["framework.rollout_is_threshold"] == "0.5_5.0"
    assert set(stored["axes"]) == {"delay.S", "optimizer.lr"}
    assert "python sweep.py -m sweep=mine" in capsys.readouterr().out
    assert run(path, "--sweep", "mine") == 2
    assert "sweeps/mine.yaml exists" in capsys.readouterr().err
    assert run(path, "--sweep", "../mine") == 2


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("loss_type: reinforce", "loss_typ: reinforce", "Did you mean algorithm.rollout_correction.loss_type"),
        ("loss_type: reinforce", "loss_type: ppo", "framework.loss_type = 'ppo'"),
        ("entropy_coeff: 0", "entropy_coeff: 0.01", "There is no entropy bonus."),
        ("adv_estimator: grpo", "adv_estimator: gae", "Advantages here are relative to the group"),
        ("loss_mode: vanilla", "loss_mode: vanilla, new_thing: 1", "actor_rollout_ref.actor.policy_loss.new_thing = 1"),
    ],
)
def test_refused(config, capsys, old, new, part):
    assert run(config(old, new)) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "part"),
    [("trainer: {a: 1}", "a file with options of verl"), ("- 1", "a mapping of options"), ("a: [", "a YAML file")],
)
def test_files_without_options(tmp_path, capsys, text, part):
    (tmp_path / "other.yaml").write_text(text)
    assert run(tmp_path / "other.yaml") == 2
    assert part in capsys.readouterr().err


def test_no_such_file(tmp_path, capsys):
    assert run(tmp_path / "absent.yaml") == 2
    assert "absent.yaml" in capsys.readouterr().err


def test_two_places_of_one_option_must_agree(tmp_path):
    path = tmp_path / "roll.yaml"
    path.write_text("pg_variant: topr\nactor_train: {pg_variant: topr}")
    assert read_config(framework("roll"), path).options == {"pg_variant": "topr"}
    path.write_text("pg_variant: topr\nactor_train: {pg_variant: ppo}")
    assert main(["import-config", "--framework", "roll", str(path)]) == 2
