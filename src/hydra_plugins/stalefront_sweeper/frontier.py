"""Sweeper `hydra/sweeper=frontier`: a search for the learning rate at which each arm begins to collapse."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_plugins.stalefront_sweeper.grid import GridSweeper

if TYPE_CHECKING:
    from stalefront.paths import SweepPaths
    from stalefront.search.loop import Bench, Launched


class FrontierSweeper(GridSweeper):
    """Options as in `stalefront.search.options.SearchOptions`."""

    def __init__(self, **options: Any) -> None:
        from stalefront.search.options import SearchOptions

        self.options = SearchOptions(**options)

    def sweep(self, arguments: list[str]) -> Any:
        """Run the search; returns what the launcher returns of its finished cells."""
        from stalefront.choice import OptionError
        from stalefront.files import locked
        from stalefront.paths import SweepPaths
        from stalefront.search.arms import end_cells, read_space
        from stalefront.sweepfiles import NamedSweep

        assert self.config is not None
        self._check_launcher()
        launcher: Any = self.launcher
        sweep = NamedSweep.from_config(self.config.get("sweep"))
        space = read_space(launcher.composer, sweep, arguments, self.options.points_per_decade, print)
        launcher.backend().prepare(end_cells(launcher.composer, space))
        paths = SweepPaths(Path(self.config.hydra.sweep.dir).absolute())
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(paths.search_lock, wait=False))
            except BlockingIOError as error:
                legal = "a directory that no other process searches in"
                way_out = "Wait until it has ended, or give another hydra.sweep.dir."
                raise OptionError("hydra.sweep.dir", str(self.config.hydra.sweep.dir), legal, way_out) from error
            return self._search(paths, space)

    def _check_launcher(self) -> None:
        """Refuse options of the launcher under which a cell's outcome does not come back."""
        from stalefront.choice import OptionError

        assert self.config is not None
        chosen = self.config.hydra.launcher
        way_out = "What is asked next depends on how the cells before it ended."
        for key, legal in (("wait", True), ("dry_run", False), ("rerun", "missing")):
            if key in chosen and chosen[key] != legal:
                shown = str(legal).lower()
                raise OptionError(f"hydra.launcher.{key}", chosen[key], f"{shown} in a search", way_out)

    def _search(self, paths: SweepPaths, space: Any) -> Any:
        from rich.console import Console

        from stalefront.search.findings import as_columns, explanation
        from stalefront.search.loop import Search

        launcher: Any = self.launcher
        wanted = launcher.options
        search = Search(paths, space, self.options, self._bench(paths))
        ended = search.run()
        returned: Any = []
        if ended and wanted.report and search.finished():
            # Nothing is left to run: this launch is the one that builds the report.
            launcher.options = wanted
            returned = launcher.launch(search.finished(), initial_job_idx=0)
        console = Console(soft_wrap=True, highlight=False)
        console.print(as_columns(search.findings()))
        print(explanation(self.options), flush=True)
        return returned

    def _bench(self, paths: SweepPaths) -> Bench:
        from stalefront.launch import LAUNCHED, STOPPED
        from stalefront.search.judge import has_collapsed
        from stalefront.search.loop import Bench, Launched

        launcher: Any = self.launcher
        launcher.options = dataclasses.replace(launcher.options, report=False)

        def cell_id(overrides: tuple[str, ...]) -> str:
            return str(launcher.composer.cell(overrides).cell.cell_id)

        def launch(jobs: Sequence[tuple[str, ...]]) -> Launched:
            launcher.launch(jobs, initial_job_idx=0)
            last = LAUNCHED[-1]
            states = {cell_id: seen.state for cell_id, seen in last.cells.items()}
            return Launched(states, stopped=last.left or last.code >= STOPPED)

        def judge(cell_id: str) -> bool | None:
            return has_collapsed(paths.root, cell_id, self.options.verdict)

        return Bench(cell_id, launch, judge)
