"""What the launchers of this package share: composing cells, and what Hydra expects back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from stalefront.compose import Composer, Planned
    from stalefront.launch import Backend, Options, Summary


class CellLauncher(Launcher):
    """Composes all cells, then runs those that are to be run."""

    options: Options
    runs_here = True

    @abstractmethod
    def backend(self) -> Backend:
        """Where the cells run."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the configuration, and make the composer that the sweeper shares."""
        from stalefront.compose import Composer

        self.config = config
        self.composer: Composer = Composer(hydra_context.config_loader, config, runs_here=self.runs_here)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run one cell a list of overrides; nothing is started unless every one of them is valid."""
        from stalefront.launch import launch

        cells = self.composer.cells(job_overrides)
        planned = list({planned.cell.cell_id: planned for planned in cells.values()}.values())
        if len(planned) < len(job_overrides):
            print(f"{len(job_overrides)} combinations, {len(planned)} distinct cells: some values change nothing.")
        where = Path(self.config.hydra.sweep.dir)
        summary = launch(where, self._header(planned), planned, self.options, self.backend())
        return [_job_return(job, cells[tuple(job)].cell.cell_id, summary) for job in job_overrides]

    def _header(self, planned: Sequence[Planned]) -> Any:
        from stalefront.plan import Header
        from stalefront.sweepfiles import NamedSweep

        sweep = NamedSweep.from_config(self.config.get("sweep"))
        values: dict[str, dict[Any, None]] = {}
        for override in dict.fromkeys(text for p in planned for text in p.overrides):
            key, _, text = override.partition("=")
            value = self.composer.parse(override).value()
            values.setdefault(key, {})[text if isinstance(value, list | dict) else value] = None
        axes = {key: list(found) for key, found in values.items() if len(found) > 1}
        # A single run is sent to the folder of single runs; see `stalefront.app.SINGLE_RUN`.
        collects = self.config.hydra.sweep.dir == self.config.hydra.run.dir
        return Header(sweep.name, sweep.question, axes, collects)


def _job_return(overrides: Sequence[str], cell_id: str, summary: Summary) -> JobReturn:
    """What Hydra expects of a job: a finished cell, or one left to go on, is completed; any other raises when asked."""
    from hydra.core.utils import JobStatus

    from stalefront.launch import CellError

    seen = summary.cells[cell_id]
    returned = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
    returned.return_value = {"cell_id": cell_id, "state": seen.state, "attempt": seen.attempt, "step": seen.step}
    if not seen.finished and not summary.left:
        returned.status = JobStatus.FAILED
        returned.return_value = CellError(f"cell {cell_id} is {seen.state}: {seen.reason}")
    return returned
