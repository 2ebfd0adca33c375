"""Profiles of sites: their fields, time limits, and where they come from."""

import pytest

from stalefront.app import run
from stalefront.choice import OptionError
from stalefront.slurm.profile import Profile, minutes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (90, 90),
        ("90", 90),
        ("10:30", 11),
        ("1:30:00", 90),
        ("0:00:01", 1),
        ("2-12", 3600),
        ("1-00:30", 1470),
        ("1-02:03:04", 1564),
    ],
)
def test_minutes_of_each_form_are_rounded_up(text, expected):
    assert minutes(text) == expected


@pytest.mark.parametrize("text", ["", "0", "soon", "-5", "1:2:3:4", 1.5, None, True])
def test_other_forms_are_refused(text):
    with pytest.raises(OptionError, match=r"slurm.time"):
        minutes(text)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("partitoin", "gpu", r"slurm\.partitoin.*partition.*slurm\.sbatch"),
        ("gpus_per_node", 0, r"gpus_per_node.*at least 1, or null"),
        ("nodes", True, "nodes"),
        ("mem_gb", "4G", r"mem_gb.*gigabytes"),
        ("setup", "module load cuda", r"setup.*list of texts"),
        ("sbatch", ["--x"], r"sbatch.*mapping"),
        ("sbatch", {"time": 5}, r"slurm\.sbatch\.time.*Use slurm\.time"),
        ("sbatch", {"array": "0-3"}, r"hydra\.launcher\.throttle"),
        ("signal_delay_s", 3600, r"signal_delay_s.*3600 s"),
    ],
)
def test_a_wrong_field_says_what_is_legal(field, value, says):
    with pytest.raises(OptionError, match=says):
        Profile.from_config({"name": "x", "time": 60, field: value})


def test_gpus_are_counted_in_gres_too():
    def gpus(gres):
        return Profile("x", gres=gres).gpus

    assert gpus("gpu:4") == 4
    assert gpus("gpu") == 1
    assert gpus("gpu:h100:2,license:3") == 2
    assert gpus("gpu:a100") == 1
    assert gpus("shard:8") == 0
    assert gpus(None) == 0
    with pytest.raises(OptionError, match="gres"):
        Profile.from_config({"name": "x", "gres": "gpu:1", "gpus_per_node": 1})


def test_the_report_needs_no_gpu_unless_its_fields_say_so():
    profile = Profile.from_config(
        {"name": "x", "partition": "gpu", "gpus_per_node": 8, "mem_gb": 500, "report": {"partition": "cpu", "time": 5}}
    )
    report = profile.for_report()
    assert (report.partition, report.gpus, report.mem_gb, report.time_min, report.cpus_per_task) == (
        "cpu",
        0,
        None,
        5,
        1,
    )


def test_a_profile_survives_its_plain_form():
    profile = Profile.from_config(
        {"name": "x", "time": "2:00:00", "setup": ["module load cuda"], "sbatch": {"reservation": 1}}
    )
    assert Profile.from_config(profile.as_dict()) == profile


def test_a_clock_without_quotes_and_a_broken_file(in_tmp, small, capsys):
    (in_tmp / "slurm/profiles").mkdir(parents=True)
    (in_tmp / "slurm/profiles/clock.yaml").write_text("partition: a\ntime: 1:30:00\n")
    (in_tmp / "slurm/profiles/broken.yaml").write_text("- a list\n")
    common = ["-m", "sweep=null", *small, "seed=0", "hydra/launcher=slurm", "hydra.launcher.dry_run=true"]
    assert run([*common, "slurm=cpu", "hydra.sweep.dir=a"]) == 0
    assert "broken.yaml is left out" in capsys.readouterr().err
    assert run([*common, "slurm=clock", "hydra.sweep.dir=b"]) == 2
    assert "write it in quotes" in capsys.readouterr().err


def test_cells_on_gpus_are_submitted_from_a_machine_without_any(in_tmp, small):
    common = ["-m", "sweep=null", *small, "seed=0", "hydra/launcher=slurm", "hydra.launcher.dry_run=true"]
    assert run([*common, "device=cuda", "slurm=default", "slurm.gpus_per_node=1", "hydra.sweep.dir=a"]) == 0
    assert "#SBATCH --gpus-per-node=1" in next(in_tmp.glob("a/jobs/*/job.sbatch")).read_text()


def test_the_users_folder_comes_first_and_unknown_profiles_are_named(in_tmp, small, capsys):
    (in_tmp / "slurm/profiles").mkdir(parents=True)
    (in_tmp / "slurm/profiles/cpu.yaml").write_text("partition: ours\ntime: 7\n")
    (in_tmp / "slurm/profiles/lab.yaml").write_text("partition: lab\nsetup: [module load python]\n")
    common = ["-m", "sweep=null", *small, "seed=0", "hydra/launcher=slurm", "hydra.launcher.dry_run=true"]
    assert run([*common, "slurm=cpu", "hydra.sweep.dir=a"]) == 0
    script = next(in_tmp.glob("a/jobs/*/job.sbatch")).read_text()
    assert "#SBATCH --partition=ours" in script
    assert "#SBATCH --time=7" in script
    assert run([*common, "slurm=lab", "slurm.time=1:00:00", "hydra.sweep.dir=b"]) == 0
    script = next(in_tmp.glob("b/jobs/*/job.sbatch")).read_text()
    assert "module load python" in script
    assert "#SBATCH --time=60" in script
    capsys.readouterr()
    assert run([*common, "slurm=nowhere"]) == 2
    assert "lab" in capsys.readouterr().err
    assert run([*common, "slurm=lab,cpu"]) == 2
    assert "a profile changes no number" in capsys.readouterr().err
    assert run([*common, "slurm=lab", "+slurm.partitoin=x"]) == 2
    assert "partition" in capsys.readouterr().err
