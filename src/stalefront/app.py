"""The command `python sweep.py`: one cell, or with `-m` a grid of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

CONFIG_ERROR = 2

# Options of Hydra that take a value, and those that show something instead of running.
WITH_VALUE = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p")
SHOWS = (
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"),
    "--experimental-rerun",
)

# A single run is a sweep of one cell: it is validated, claimed, resumed and isolated in the same way.
SINGLE_RUN = ("hydra.mode=MULTIRUN", "~sweep", "hydra.sweep.dir=${hydra.run.dir}", "hydra.launcher.report=false")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the application and exit: 0 all cells have finished, 1 some have not, 2 the configuration is wrong."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Exit code of the application for these command-line arguments."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from stalefront.choice import OptionError
    from stalefront.launch import CellError, exit_code
    from stalefront.warm import environment

    debug = os.environ.get("HYDRA_FULL_ERROR") == "1"
    command = sys.argv
    try:
        # With the variable Hydra raises what it would print with a traceback and exit code 1.
        with environment({"HYDRA_FULL_ERROR": "1"}), working_directory_importable():
            return _hydra([*arguments])
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        if debug or not (isinstance(error, OptionError | HydraException | OmegaConfBaseException) or _of_hydra(error)):
            raise
        sys.stdout.flush()
        print(f"error: {explain(error)}", file=sys.stderr)
        return CONFIG_ERROR
    except CellError:
        # Hydra's own sweepers ask every cell for its value; which ones failed was said when they did.
        return exit_code()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        sys.argv = command


@contextmanager
def working_directory_importable() -> Iterator[None]:
    """Let `task.reward_function=module:f` name a module beside the data, wherever `sweep.py` lies.

    Cells' processes get the path with everything else that multiprocessing prepares. It comes last, so that nothing
    in the working directory stands in for an installed module.
    """
    before = [*sys.path]
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def _hydra(arguments: list[str]) -> int:
    import hydra
    from hydra.core.plugins import Plugins

    from hydra_plugins.stalefront_launcher.local import LocalLauncher
    from hydra_plugins.stalefront_launcher.slurm import SlurmLauncher
    from hydra_plugins.stalefront_sweeper.frontier import FrontierSweeper
    from hydra_plugins.stalefront_sweeper.grid import GridSweeper
    from stalefront.launch import LAUNCHED, exit_code
    from stalefront.resolvers import register_resolvers
    from stalefront.slurm.profile import register_profiles
    from stalefront.sweepfiles import register_sweeps

    # Hydra finds plugins by walking folders, which misses packages of an editable installation.
    for plugin in (LocalLauncher, SlurmLauncher, GridSweeper, FrontierSweeper):
        Plugins.instance().register(plugin)
    register_resolvers()
    register_sweeps()
    register_profiles()
    LAUNCHED.clear()
    sys.argv = [sys.argv[0], *rewrite(arguments)]

    @hydra.main(config_path="pkg://stalefront.conf", config_name="config", version_base="1.3")
    def application(_: Any) -> None:
        """Never called: the launchers of this package run cells from their directories."""

    application()
    return exit_code()


def rewrite(arguments: Sequence[str]) -> list[str]:
    """Command line as Hydra gets it.

    Without `-m` it becomes a sweep of one cell. `sweep=null` becomes `~sweep`, Hydra's way to leave a group out. A
    plain value becomes a sweep of one value: Hydra sets plain values on the default choices first, so that
    `delay=none,lag delay.lag_updates=3` would be refused.
    """
    if any(argument in SHOWS for argument in arguments):
        return list(arguments)
    grid = any(argument in ("-m", "--multirun") for argument in arguments)
    grid = grid or any(argument.split("=") == ["hydra.mode", "MULTIRUN"] for argument in arguments)
    rewritten = [
        _override(argument, grid) if is_override else argument for argument, is_override in _overrides(arguments)
    ]
    return rewritten if grid else [*SINGLE_RUN, *rewritten]


def _overrides(arguments: Sequence[str]) -> Iterator[tuple[str, bool]]:
    before = ""
    for argument in arguments:
        yield argument, not argument.startswith("-") and before not in WITH_VALUE
        before = argument


def _override(argument: str, grid: bool) -> str:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from stalefront.choice import OptionError

    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise OptionError("argument", argument, "key=value in Hydra's grammar", explain(error)) from error
    key = override.key_or_group
    if override.is_hydra_override():
        return argument
    if key.split(".")[0] == "sweep":
        if not grid and override.value() is not None:
            raise OptionError(key, override.get_value_string(), "null for a single run", "Add -m for a sweep.")
        return "~sweep" if key == "sweep" and override.value() is None else argument
    if key.split(".")[0] == "slurm":
        if override.is_sweep_override():
            raise OptionError(key, override.get_value_string(), "one value: a profile changes no number")
        return argument
    if override.is_sweep_override():
        if not grid:
            raise OptionError(key, override.get_value_string(), "one value for a single run", "Add -m for a grid.")
        return argument
    return argument if override.get_key_element() != key else _one_value(override)


def _one_value(override: Override) -> str:
    """A plain value as a sweep of one value."""
    if override.value() in (None, ""):
        # Hydra has no sweep over one null or one empty text; the same twice is one value of an axis.
        value = "null" if override.value() is None else "''"
        return f"{override.key_or_group}={value},{value}"
    return f"{override.key_or_group}=choice({override.get_value_element_as_str()})"


def _of_hydra(error: BaseException) -> bool:
    """True when Hydra or OmegaConf itself raised the error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return module.startswith(("hydra.", "omegaconf."))


def explain(error: BaseException) -> str:
    """What a user needs of an error: its own message, or the `OptionError` that caused it."""
    from stalefront.choice import OptionError

    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OptionError):
            return str(cause)
        # Where Hydra looked for files says nothing about what was typed.
        texts.append(str(cause).partition("Config search path:")[0].strip())
        cause = cause.__cause__ or cause.__context__
    return "\n".join(text for text in dict.fromkeys(texts) if text) or type(error).__name__


if __name__ == "__main__":
    main()
