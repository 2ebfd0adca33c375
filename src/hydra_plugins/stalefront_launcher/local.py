"""Launcher `hydra/launcher=local`: a pool of processes on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra_plugins.stalefront_launcher.base import CellLauncher

if TYPE_CHECKING:
    from stalefront.launch import Backend


class LocalLauncher(CellLauncher):
    """Options as in `stalefront.launch.Options` and `LocalBackend`."""

    def __init__(self, *, rerun: str, report: bool, workers: int | None, gpus: Sequence[int | str]) -> None:
        from stalefront.launch import Options

        self.options = Options(rerun, report)
        self.workers, self.gpus = workers, gpus

    def backend(self) -> Backend:
        """Processes of this machine."""
        from stalefront.launch import LocalBackend

        return LocalBackend(self.workers, self.gpus)
