"""How many cells run at a time on this machine, and on which devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stalefront.cell import Cell
from stalefront.choice import OptionError


@dataclass
class Slots:
    """How much may run at a time.

    Attributes
    ----------
    free : int
        Cores, or workers, that are not taken.
    by_threads : bool
        A cell takes as many as its ranks have threads; otherwise it takes one.
    gpus : list or None
        CUDA devices that are not taken; None when cells are not bound to devices.
    """

    total: int
    by_threads: bool
    gpus: list[str] | None
    free: int = field(init=False)

    def __post_init__(self) -> None:
        self.free = self.total

    def cost(self, cell: Cell) -> int:
        """Slots that a cell takes."""
        if self.gpus is not None:
            return devices(cell)
        return min(cell.threads * cell.model.ranks, self.total) if self.by_threads else 1

    def fits(self, cell: Cell) -> bool:
        """True when there is enough for a cell now."""
        return self.cost(cell) <= self.free

    def take(self, cell: Cell) -> str | None:
        """Take what a cell needs; returns its devices (`0,1`), None where cells are not bound to devices."""
        self.free -= self.cost(cell)
        if self.gpus is None:
            return None
        taken, self.gpus = self.gpus[: devices(cell)], self.gpus[devices(cell) :]
        return ",".join(taken)

    def give_back(self, cell: Cell, gpu: str | None) -> None:
        """Free what a cell had."""
        self.free += self.cost(cell)
        if self.gpus is not None and gpu is not None:
            self.gpus += gpu.split(",")


def devices(cell: Cell) -> int:
    """Devices that a cell takes where cells are bound to devices: one a rank."""
    return cell.model.ranks if cell.device.startswith("cuda") else 1


def make_slots(workers: int | None, gpus: Sequence[int | str], cells: Sequence[Cell]) -> Slots:
    """Slots of a launch: `workers` of them, GPUs (those listed, or all of them), or as many as the cores carry."""
    if workers is not None and workers < 1:
        raise OptionError("hydra.launcher.workers", workers, "a whole number of at least 1, or null")
    on_cuda = [cell.device for cell in cells if cell.device.startswith("cuda")]
    if on_cuda and not gpus and workers is None:
        import torch

        gpus = range(torch.cuda.device_count()) if set(on_cuda) == {"cuda"} else ()
        workers = None if gpus else 1
    if not gpus:
        return Slots(workers or cores(), by_threads=workers is None, gpus=None)
    if workers is not None:
        raise OptionError(
            "hydra.launcher.workers", workers, "null with hydra.launcher.gpus", "A cell runs on its own GPUs."
        )
    check_gpus(gpus, cells)
    bound = next((device for device in on_cuda if ":" in device), None)
    if bound is not None:
        legal = "cuda with hydra.launcher.gpus: every cell sees one device"
        raise OptionError("device", bound, legal, "Leave out the index.")
    most = max(cells, key=devices)
    if devices(most) > len(gpus):
        legal = f"at most {len(gpus)}: one device a rank of hydra.launcher.gpus={list(gpus)}"
        raise OptionError("model.ranks", most.model.ranks, legal, "List more devices, or run fewer ranks.")
    names = [_visible(gpu) for gpu in gpus]
    return Slots(len(names), by_threads=False, gpus=names)


def check_gpus(gpus: Sequence[int | str], cells: Sequence[Cell]) -> None:
    """Refuse devices that no cell would use and devices that are not here, before anything runs."""
    if not any(cell.device.startswith("cuda") for cell in cells):
        found = ", ".join(sorted({cell.device for cell in cells}))
        way_out = f"All cells have device={found}: add device=cuda, or leave out hydra.launcher.gpus."
        raise OptionError("hydra.launcher.gpus", list(gpus), "[] unless cells run on cuda", way_out)
    import torch

    count = torch.cuda.device_count()
    for gpu in gpus:
        if count == 0 or (isinstance(gpu, int) and not 0 <= gpu < count):
            legal = f"indices of CUDA devices that are here: {', '.join(map(str, range(count))) or 'none'}"
            raise OptionError("hydra.launcher.gpus", list(gpus), legal, "Leave out the others.")


def _visible(gpu: int | str) -> str:
    """CUDA name of the device with this index among those that this process may see."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None or not isinstance(gpu, int):
        return str(gpu)
    names = [name for name in allowed.split(",") if name]
    if not 0 <= gpu < len(names):
        raise OptionError("hydra.launcher.gpus", gpu, f"an index into CUDA_VISIBLE_DEVICES={allowed}")
    return names[gpu]


def cores() -> int:
    """Cores that this process may use: its affinity, bounded by the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, _, period = quota.read_text(encoding="ascii").partition(" ")
        if limit != "max":
            allowed = min(allowed, max(1, int(limit) // int(period)))
    return allowed
