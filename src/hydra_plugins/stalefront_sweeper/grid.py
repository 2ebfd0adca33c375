"""Sweeper `hydra/sweeper=grid`: every combination of the axes of a named sweep and of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig


class GridSweeper(Sweeper):
    """Expands the axes and hands all cells to the launcher at once."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what a sweep needs; the launcher is made by Hydra from `hydra/launcher`."""
        from hydra.core.plugins import Plugins

        from stalefront.choice import OptionError

        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        if not hasattr(self.launcher, "composer"):
            # Hydra's own launchers call a task function and know nothing of cells, claims and outcomes.
            raise OptionError("hydra/launcher", type(self.launcher).__name__, "local", "Leave it out.")

    def sweep(self, arguments: list[str]) -> Any:
        """Run the sweep; returns what the launcher returns."""
        from stalefront.grid import collect_axes, expand
        from stalefront.sweepfiles import NamedSweep

        assert self.config is not None
        assert self.launcher is not None
        # The launcher composes cells too; with one composer every variant is composed once.
        composer = self.launcher.composer  # type: ignore[attr-defined]
        sweep = NamedSweep.from_config(self.config.get("sweep"))
        jobs = expand(collect_axes(composer, sweep, arguments), composer, print)
        return self.launcher.launch(jobs, initial_job_idx=0)
