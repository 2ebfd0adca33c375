"""Launcher `hydra/launcher=slurm`: cells packed into arrays of Slurm jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hydra_plugins.stalefront_launcher.base import CellLauncher

if TYPE_CHECKING:
    from stalefront.launch import Backend


class SlurmLauncher(CellLauncher):
    """Options as in `stalefront.launch.Options` and `stalefront.slurm.backend.SlurmOptions`."""

    runs_here = False

    def __init__(self, *, rerun: str, report: bool, **options: Any) -> None:
        from stalefront.launch import Options
        from stalefront.slurm.backend import SlurmOptions

        self.options = Options(rerun, report)
        self.slurm = SlurmOptions(**options)

    def backend(self) -> Backend:
        """Jobs of the profile that `slurm=NAME` chose."""
        from omegaconf import OmegaConf

        from stalefront.slurm.backend import SlurmBackend
        from stalefront.slurm.profile import Profile

        profile = OmegaConf.to_container(self.config.slurm, resolve=True)
        assert isinstance(profile, dict)
        chosen = Profile.from_config({str(key): value for key, value in profile.items()})
        return SlurmBackend(chosen, self.slurm, rerun=self.options.rerun, report=self.options.report)
