"""Site profiles: `slurm/profiles/NAME.yaml` is the choice `slurm=NAME`, from any working directory."""

from __future__ import annotations

import dataclasses
import importlib.resources
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stalefront.choice import OptionError

USER_FOLDER = Path("slurm/profiles")
# Slurm's own forms of a time limit: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.
DAYS = re.compile(r"(\d+)-(\d{1,2})(?::(\d{1,2}))?(?::(\d{1,2}))?")
# What YAML 1.1 takes for a number to the base 60.
SEXAGESIMAL = re.compile(r"^time:\s*\d+(:\d+)+\s*(#.*)?$", re.MULTILINE)
# Options that belong to fields of the profile, or that a job cannot do without as they are.
OWNED = {
    **{name: f"slurm.{name}" for name in ("partition", "account", "qos", "constraint", "exclude", "nodelist", "nodes")},
    **{
        "time": "slurm.time",
        "mem": "slurm.mem_gb",
        "signal": "slurm.signal_delay_s",
        "array": "hydra.launcher.throttle",
    },
    **{"cpus-per-task": "slurm.cpus_per_task", "gpus-per-node": "slurm.gpus_per_node"},
    **dict.fromkeys(("output", "error", "open-mode", "requeue", "job-name", "ntasks-per-node", "dependency"), ""),
}
CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d{2})")


@dataclass(frozen=True)
class Profile:
    """What a site asks of a job; null leaves the cluster's default.

    Attributes
    ----------
    name : str
    partition, account, qos, constraint, exclude, nodelist : str or None
        As in sbatch.
    gres : str or None
        As in sbatch, where a cluster wants it instead of GPUs a node.
    gpus_per_node : int or None
    nodes : int
    cpus_per_task : int or None
        None for what the cells of a job use side by side.
    mem_gb : float or None
        Host memory a node.
    gpu_mem_gb : float or None
        Memory of one GPU, to check packing against; it is not sent to Slurm.
    time_min : int
        Time limit in minutes; files and command lines may use any of Slurm's forms.
    signal_delay_s : int
        Seconds before the time limit at which cells are asked to save a checkpoint. Longer than a learner step.
    setup : sequence of str
        Shell lines before the job's command: modules, environment variables.
    python : str or None
        Interpreter on the nodes, or a command that ends in one; None for the one of the launcher.
    srun_args : sequence of str
    sbatch : mapping
        Any other option of sbatch by its long name: `{reservation: rl, mail-type: END}`.
    report : mapping
        Fields of this profile that differ for the job that writes the report.
    """

    name: str
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    gres: str | None = None
    gpus_per_node: int | None = None
    nodes: int = 1
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    gpu_mem_gb: float | None = None
    time_min: int = 60
    signal_delay_s: int = 120
    setup: Sequence[str] = ()
    python: str | None = None
    srun_args: Sequence[str] = ()
    sbatch: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Profile:
        """Profile of the composed group `slurm`; raises `OptionError`."""
        values = dict(config)
        names = [f.name for f in dataclasses.fields(cls)]
        for key in values.keys() - {*names, "time"}:
            legal = ", ".join(name for name in names if name != "time_min")
            way_out = f"Other options of sbatch: slurm.sbatch={{{key}: …}}."
            raise OptionError(f"slurm.{key}", values[key], f"one of {legal}, time", way_out)
        if "time" in values:
            values["time_min"] = minutes(values.pop("time"))
        profile = cls(**values)
        profile.check()
        return profile

    def check(self) -> None:
        """Counts are counts, lists are lists, and the signal comes while the job runs."""
        for name in ("nodes", "time_min", "signal_delay_s"):
            self._require(is_whole(getattr(self, name)), name, "a whole number of at least 1")
        for name in ("gpus_per_node", "cpus_per_task"):
            value = getattr(self, name)
            self._require(value is None or is_whole(value), name, "a whole number of at least 1, or null")
        for name in ("mem_gb", "gpu_mem_gb"):
            value = getattr(self, name)
            is_size = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            self._require(value is None or is_size, name, "gigabytes, or null")
        for name in ("setup", "srun_args"):
            value = getattr(self, name)
            is_lines = isinstance(value, list | tuple) and all(isinstance(line, str) for line in value)
            self._require(is_lines, name, "a list of texts")
        for name in ("sbatch", "report"):
            self._require(isinstance(getattr(self, name), Mapping), name, "a mapping")
        for option in self.sbatch:
            owner = OWNED.get(str(option).replace("_", "-"))
            if owner is not None:
                way_out = f"Use {owner}." if owner else "Leave it out."
                raise OptionError(f"slurm.sbatch.{option}", self.sbatch[option], "an option without a field", way_out)
        way_out = "Nothing would be left to run in: raise slurm.time or lower this."
        in_time = self.signal_delay_s < 60 * self.time_min
        self._require(in_time, "signal_delay_s", f"less than the time limit, {60 * self.time_min} s", way_out)
        both = self.gres is not None and self.gpus_per_node is not None and "gpu" in self.gres
        self._require(not both, "gres", f"no GPUs beside slurm.gpus_per_node={self.gpus_per_node}", "Set one to null.")

    def _require(self, holds: bool, name: str, legal: str, way_out: str = "") -> None:
        key = "time" if name == "time_min" else name
        if not holds:
            raise OptionError(f"slurm.{key}", getattr(self, name), legal, way_out)

    @property
    def gpus(self) -> int:
        """GPUs of a job on each node, also where `gres` asks for them; 0 for none."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        counts = re.findall(r"gpu(?::[A-Za-z_][\w.-]*)?(?::(\d+))?(?=,|$)", self.gres or "")
        return sum(int(count or 1) for count in counts)

    def for_report(self) -> Profile:
        """Profile of the job that writes the report: one process, no GPU, half an hour."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain |= {"gpus_per_node": None, "gres": None, "nodes": 1, "cpus_per_task": 1, "mem_gb": None}
        plain |= {"time_min": 30, "signal_delay_s": 60, "srun_args": (), "report": {}}
        plain.update(self.report)
        return Profile.from_config(plain)

    def as_dict(self) -> dict[str, Any]:
        """Plain form, which `from_config` reads back."""
        return dataclasses.asdict(self)


def is_whole(value: object) -> bool:
    """True for a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def minutes(value: object) -> int:
    """Minutes of a time limit in any of Slurm's forms, rounded up."""
    text = str(value).strip()
    if re.fullmatch(r"\d+", text) and int(text) > 0:
        return int(text)
    seconds = 0
    if found := DAYS.fullmatch(text):
        days, hours, mins, secs = (int(part or 0) for part in found.groups())
        seconds = 86400 * days + 3600 * hours + 60 * mins + secs
    elif found := CLOCK.fullmatch(text):
        hours, mins, secs = (int(part or 0) for part in found.groups())
        seconds = 3600 * hours + 60 * mins + secs
    if seconds <= 0:
        way_out = "YAML reads 1:30:00 without quotes as a number: write it in quotes."
        raise OptionError("slurm.time", value, "minutes (90), HH:MM:SS, D-HH:MM:SS or another form of Slurm's", way_out)
    return -(-seconds // 60)


def register_profiles(folder: Path | None = None) -> None:
    """Make every profile of this package and of `folder` (default: `./slurm/profiles`) a choice of the group `slurm`.

    A file of `folder` stands in for a packaged one of its name. Every field can be set on the command line, whether
    the file names it or not.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    defaults = {f.name: None for f in dataclasses.fields(Profile)} | Profile("").as_dict()
    defaults["time"] = defaults.pop("time_min")
    packaged = importlib.resources.files("stalefront.slurm").joinpath("profiles")
    with importlib.resources.as_file(packaged) as here:
        paths = [*sorted(here.glob("*.yaml")), *sorted((folder or USER_FOLDER).glob("*.yaml"))]
        for path in paths:
            try:
                config = OmegaConf.load(path)
            except (YAMLError, OmegaConfBaseException, OSError) as error:
                print(f"warning: the profile {path} is left out, it cannot be read: {error}", file=sys.stderr)
                continue
            if not isinstance(config, DictConfig):
                print(f"warning: the profile {path} is left out: it holds no mapping", file=sys.stderr)
                continue
            if SEXAGESIMAL.search(path.read_text(encoding="utf-8")):
                # YAML makes 5400 of it, which would be minutes.
                config["time"] = "<a clock without quotes>"
            # An open mapping, so that a misspelt field reaches the check that knows the legal ones.
            node = OmegaConf.create({**defaults, **{str(k): v for k, v in config.items()}, "name": path.stem})
            ConfigStore.instance().store(group="slurm", name=path.stem, node=node, provider="stalefront.slurm")
