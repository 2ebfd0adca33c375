"""The command line: what is rewritten for Hydra, and mistakes that end in one clear message with nothing written."""

import pytest

from stalefront.app import SINGLE_RUN, rewrite, run
from stalefront.choice import OptionError


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["-m"], ["-m"]),
        (["-m", "sweep=null"], ["-m", "~sweep"]),
        (["-m", "sweep=smoke", "sweep.name=mine"], ["-m", "sweep=smoke", "sweep.name=mine"]),
        (["--multirun", "delay.S=4"], ["--multirun", "delay.S=choice(4)"]),
        (["-m", "delay.S=1,4", "seed=range(0,2)"], ["-m", "delay.S=1,4", "seed=range(0,2)"]),
        (["-m", "correction=[a,b]"], ["-m", "correction=choice([a,b])"]),
        (
            ["-m", "model.warmup=null", "model.alphabet="],
            ["-m", "model.warmup=null,null", "model.alphabet='',''"],
        ),
        (["-m", "+a.b=1", "~c", "++d=2"], ["-m", "+a.b=1", "~c", "++d=2"]),
        (["-m", "hydra.sweep.dir=x", "hydra/launcher=local"], ["-m", "hydra.sweep.dir=x", "hydra/launcher=local"]),
        (["-m", "-cd", "a=b"], ["-m", "-cd", "a=b"]),
        (["hydra.mode=MULTIRUN", "seed=1"], ["hydra.mode=MULTIRUN", "seed=choice(1)"]),
        ([], [*SINGLE_RUN]),
        (["seed=1"], [*SINGLE_RUN, "seed=choice(1)"]),
        (["seed=1", "--cfg", "job"], ["seed=1", "--cfg", "job"]),
        (["--help"], ["--help"]),
    ],
)
def test_rewritten(typed, expected):
    assert rewrite(typed) == expected


@pytest.mark.parametrize(
    ("typed", "part"),
    [(["seed=1,2"], "Add -m"), (["sweep=smoke"], "Add -m"), (["-m", "seed"], "argument"), (["-m", "a=[1"], "argument")],
)
def test_not_rewritten(typed, part):
    with pytest.raises(OptionError, match=part):
        rewrite(typed)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["-m", "optimizer.lrr=1e-3"], ["optimizer.lrr = 0.001", "Did you mean optimizer.lr"]),
        (["optimizer.lrr=1e-3"], ["optimizer.lrr = 0.001", "Did you mean optimizer.lr"]),
        (["-m", "delay.S=-1,4"], ["delay.S = -1", "at least 1"]),
        (["-m", "seed=0,1", "optimizer.lr=1e-3,-1e-3"], ["optimizer.lr = -0.001", "above 0"]),
        (["-m", "model=pretrained", "model.checkpoint=/no/such/folder"], ["model.checkpoint = '/no/such/folder'"]),
        (["-m", "model=pretrained"], ["model.checkpoint = '<absent>'"]),
        (["-m", "correction=none,token_tis"], ["correction.token_tis.anchor", "loss=reinforce"]),
        (["-m", "delay=none", "delay.S=1,4"], ["delay.S = [1, 4]", "delay=reuse"]),
        (["-m", "sweep=typo"], ["sweep/typo", "smoke"]),
        (["-m", "delay=typo"], ["delay/typo", "reuse"]),
        (["-m", "loss=null"], ["loss", "None", "one of bnpo"]),
        (["-m", "hydra.launcher.rerun=never"], ["hydra.launcher.rerun = 'never'", "missing"]),
        (["-m", "hydra.launcher.workers=0"], ["hydra.launcher.workers = 0"]),
        (["-m", "hydra.launcher.gpus=[0]", "hydra.launcher.workers=2"], ["hydra.launcher.workers = 2"]),
        (["-m", "hydra.launcher.gpus=[7]"], ["hydra.launcher.gpus = [7]", "device=cpu", "add device=cuda"]),
        (["-m", "hydra.launcher.worker=2"], ["hydra.launcher.worker"]),
        (["-m", "hydra/launcher=basic", "sweep=null"], ["hydra/launcher", "local"]),
        (["-m", "device=cuda:99"], ["device = 'cuda:99'"]),
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_written(in_tmp, capsys, arguments, parts):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    for part in parts:
        assert part in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("error:") == 1
    assert "Traceback" not in captured.err
    assert "search path" not in captured.err
    assert list(in_tmp.iterdir()) == []


def test_help_and_configuration_are_shown(in_tmp, capsys):
    with pytest.raises(SystemExit):
        run(["--help"])
    shown = capsys.readouterr().out
    for word in ("python sweep.py -m sweep=smoke", "delay: lag, none, reuse", "rerun=missing|failed|all", "seed: 0"):
        assert word in shown
    assert run(["--cfg", "job", "delay=lag"]) == 0
    assert "lag_updates: 3" in capsys.readouterr().out
    assert list(in_tmp.iterdir()) == []
