"""The cells of `bench/slurm.py` as an ordinary Hydra application, for hydra-submitit-launcher.

The task function does what a job of our launcher does for one cell: the same configuration, the same `run_cell`, the
same files. What Hydra's user gets from Hydra is left to Hydra: directories, logging, and what an exception means.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from stalefront.cell import Cell
from stalefront.files import write_json
from stalefront.resolvers import register_resolvers
from stalefront.run import run_cell
from stalefront.session import Session
from stalefront.slurm.profile import register_profiles
from stalefront.sweepfiles import register_sweeps


def _leave_signals(_: Session) -> None:
    """A cell of ours would take USR2 from submitit, whose protocol of checkpoint and requeue is what is compared."""


def run(config: DictConfig) -> str:
    """Run the cell of this configuration in Hydra's output directory; an error is raised, as a Hydra job would."""
    register_resolvers()
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    cell, root = Cell.from_config(values), Path(HydraConfig.get().runtime.output_dir)
    cache = Path(HydraConfig.get().sweep.dir).absolute() / "cache"
    stored = {"cell_id": cell.cell_id, "cell": cell.as_dict(), "run": {**values["run"], "cache_dir": str(cache)}}
    write_json(root / "config.json", {"format": 1, **stored, "overrides": list(HydraConfig.get().overrides.task)})
    with (root / "starts").open("a") as starts:
        starts.write("1\n")
    Session.stop_on_signals = _leave_signals  # type: ignore[method-assign]
    # Hydra starts a cell over whatever lies there, but run_cell would leave the outcome of before on an early death.
    (root / "outcome.json").unlink(missing_ok=True)
    outcome = run_cell(root)
    if outcome["state"] == "failed":
        raise RuntimeError(outcome["reason"])
    return str(outcome["state"])


if __name__ == "__main__":
    for register in (register_resolvers, register_sweeps, register_profiles):
        register()
    hydra.main(config_path="pkg://stalefront.conf", config_name="config", version_base="1.3")(run)()
