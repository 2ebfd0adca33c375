"""Packing cells into jobs and jobs into arrays, and what a job asks Slurm for."""

import re
from types import SimpleNamespace

import pytest

from stalefront.app import run
from stalefront.choice import OptionError
from stalefront.slurm.backend import SlurmOptions, check_devices, check_memory, check_ranks
from stalefront.slurm.profile import Profile
from stalefront.slurm.submit import dependency, job_name, pack, parameters, setup_lines, shares, split

OPTIONS = {
    **{"wait": True, "dry_run": False, "cells_per_job": 1, "width": 1, "throttle": None},
    **{"poll_s": 5, "timeouts": 20, "max_array": None},
}


def tasks(*kinds):
    """A task a kind (device, threads, ranks), numbered."""
    made = []
    for number, (device, threads, ranks) in enumerate(kinds):
        model = SimpleNamespace(ranks=ranks)
        cell = SimpleNamespace(device=device, threads=threads, model=model, cell_id=str(number))
        made.append(SimpleNamespace(planned=SimpleNamespace(cell=cell)))
    return made


def ids(jobs):
    return [[task.planned.cell.cell_id for task in job] for job in jobs]


def test_a_job_holds_cells_that_need_the_same_of_a_node():
    jobs = pack(tasks(("cpu", 1, 1), ("cuda", 1, 1), ("cpu", 1, 1), ("cpu", 2, 1), ("cpu", 1, 1)), 2)
    assert ids(jobs) == [["0", "2"], ["4"], ["1"], ["3"]]
    assert [ids(array) for array in split(jobs, 10)] == [[["0", "2"], ["4"]], [["1"]], [["3"]]]
    assert [len(array) for array in split(pack(tasks(*[("cpu", 1, 1)] * 7), 1), 3)] == [3, 3, 1]


@pytest.mark.parametrize(("arrays", "throttle"), [(1, 5), (3, 10), (3, 3), (5, 2), (1, 1)])
def test_arrays_share_a_throttle_and_never_run_more(arrays, throttle):
    found = shares(arrays, throttle)
    chains = {}
    for number, share in enumerate(found):
        chains[number] = chains[share.after] if share.after is not None else share.parallel
    # Arrays that nothing holds back run at once; one that waits takes the place of the one it waits for.
    assert sum(share.parallel for share in found if share.after is None) == throttle
    assert all(share.after is None or share.after < number for number, share in enumerate(found))


def test_without_a_throttle_none_waits():
    assert all(share.after is None and share.parallel > 10**6 for share in shares(4, None))


def test_what_a_job_asks_for():
    profile = Profile.from_config(
        {
            **{"name": "x", "partition": "gpu", "gpus_per_node": 4, "nodes": 2, "mem_gb": 1.5, "time": 30},
            **{"setup": ["module load cuda"], "sbatch": {"reservation": "rl"}},
        }
    )
    cells = [task.planned.cell for task in tasks(("cuda", 3, 8))]
    found = parameters(profile, "sf-x", cells, 1, ["/code/abc"])
    assert found["cpus_per_task"] == 3 * 4
    assert (found["mem"], found["time"], found["nodes"], found["gpus_per_node"]) == ("1536M", 30, 2, 4)
    assert found["additional_parameters"] == {"requeue": True, "reservation": "rl"}
    assert "--cpus-per-task=12" in found["srun_args"]
    assert {"--nodes=1", "--ntasks=1"} <= set(found["srun_args"])
    assert found["setup"] == ["module load cuda", setup_lines(profile, ["/code/abc"])[-1]]
    assert "PYTHONPATH=/code/abc" in found["setup"][-1]
    assert "qos" not in found
    cells = [task.planned.cell for task in tasks(("cpu", 2, 1))]
    assert parameters(Profile("x"), "sf-x", cells, 3, ["/c"])["cpus_per_task"] == 6
    assert parameters(Profile("x", cpus_per_task=9), "sf-x", cells, 3, ["/c"])["cpus_per_task"] == 9


def test_names_and_dependencies():
    assert job_name("my sweep/1", "20260101T000000-0") == "sf-my_sweep_1-20260101T000000-0"
    assert dependency("afterany", []) == {}
    assert dependency("afterany", ["1", "2"]) == {"dependency": "afterany:1:2"}


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("width", 2, "at most cells_per_job=1"),
        ("cells_per_job", 0, "at least 1"),
        ("throttle", 0, "or null"),
        ("poll_s", 0.1, "at least 1 second"),
        ("timeouts", -1, "0 for never"),
        ("wait", "no", "true or false"),
    ],
)
def test_an_impossible_option_says_what_is_legal(option, value, says):
    with pytest.raises(OptionError, match=rf"hydra\.launcher\.{option}.*{says}"):
        SlurmOptions(**{**OPTIONS, option: value})


def test_gpus_and_cells_that_do_not_go_together(make_cell):
    cpu, cuda = make_cell(), make_cell(device="cuda")
    check_devices(Profile("x"), [cpu])
    check_devices(Profile("x", gpus_per_node=1), [cuda])
    with pytest.raises(OptionError, match=r"device.*cuda.*slurm=cpu"):
        check_devices(Profile("x", gpus_per_node=1), [cuda, cpu])
    with pytest.raises(OptionError, match=r"slurm\.gpus_per_node"):
        check_devices(Profile("x"), [cuda])
    with pytest.raises(OptionError, match="Leave out the index"):
        check_devices(Profile("x", gpus_per_node=1), [make_cell(device="cuda:1")])


def test_ranks_have_a_place_each(make_cell):
    two = make_cell(**{"model.ranks": 2, "device": "cuda"})
    check_ranks(Profile("x", gpus_per_node=2), SlurmOptions(**OPTIONS), [two])
    check_ranks(Profile("x", gpus_per_node=1, nodes=2), SlurmOptions(**OPTIONS), [two])
    with pytest.raises(OptionError, match=r"Raise slurm\.gpus_per_node to 2"):
        check_ranks(Profile("x", gpus_per_node=1), SlurmOptions(**OPTIONS), [two])
    with pytest.raises(OptionError, match=r"multiple of slurm\.nodes=3"):
        check_ranks(Profile("x", gpus_per_node=1, nodes=3), SlurmOptions(**OPTIONS), [two])
    packed = SlurmOptions(**{**OPTIONS, "cells_per_job": 2, "width": 2})
    with pytest.raises(OptionError, match="a cell of 2 ranks takes 2 GPUs"):
        check_ranks(Profile("x", gpus_per_node=2), packed, [two])


def test_packing_that_memory_cannot_hold_is_refused(make_cell):
    packed = SlurmOptions(**{**OPTIONS, "cells_per_job": 8, "width": 8})
    check_memory(Profile("x"), packed, [make_cell()])
    check_memory(Profile("x", mem_gb=64), packed, [make_cell()])
    with pytest.raises(OptionError, match=r"width = 8.*slurm\.mem_gb=1.*GiB.*lower hydra\.launcher\.width"):
        check_memory(Profile("x", mem_gb=1), packed, [make_cell()])


def test_without_slurm_the_launcher_says_where_it_works(in_tmp, small, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert run(["-m", "sweep=null", *small, "seed=0", "hydra/launcher=slurm", "slurm=cpu"]) == 2
    assert "hydra.launcher.dry_run=true" in capsys.readouterr().err
    assert not (in_tmp / "runs").exists()


def test_a_dry_run_needs_no_slurm_and_its_script_names_no_pickle(in_tmp, small, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    common = ["-m", "sweep=null", *small, "seed=range(0,5)", "hydra/launcher=slurm", "slurm=cpu"]
    options = ["hydra.launcher.dry_run=true", "hydra.launcher.max_array=2", "hydra.launcher.cells_per_job=2"]
    assert run([*common, *options, "hydra.sweep.dir=s"]) == 0
    scripts = [path.read_text() for path in sorted(in_tmp.glob("s/jobs/*/job.sbatch"))]
    assert ["#SBATCH --array=0-1%2" in text for text in scripts] == [True, False]
    for text in scripts:
        command = next(line for line in text.splitlines() if line.startswith("srun"))
        assert re.search(r"-m stalefront\.slurm\.job \S+/s \S+ \"\$\{SLURM_ARRAY_TASK_ID:-0\}\"", command)
        assert "#SBATCH --signal=USR2@120" in text
        assert "#SBATCH --requeue" in text
