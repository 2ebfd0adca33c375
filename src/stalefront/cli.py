"""The command `stalefront`: looks at sweep directories, stops them, and runs cells again.

Training is started by `python sweep.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from stalefront.choice import OptionError
from stalefront.commands.planned import Sweep

WRONG, STOPPED = 2, 130
CELL = "a cell: its id, the start of its id, or settings that only it has, as in 'delay.S=4 optimizer.lr=0.001'"
CELLS = f"{CELL}; without any, all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code."""
    parser = _parser()
    options, extra = parser.parse_known_args(arguments)
    # argparse gives cells that follow an option to nobody.
    if extra and (not hasattr(options, "cells") or any(word.startswith("-") for word in extra)):
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    if extra:
        options.cells = [*options.cells, *extra]
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except OptionError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    except PermissionError as error:
        problem = OptionError(str(error.filename), error.strerror, "what this user may write", "Ask its owner.")
        print(f"error: {problem}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:
        # Whoever read has seen enough (`| head`); nothing is to be written to it when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stalefront", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_status(commands)
    _add_logs(commands)
    _add_cancel(commands)
    _add_retry(commands)
    _add(commands, "report", _report, "build the report anew from the recorded files")
    _add(commands, "table", _table, "print the run table, one row a planned cell, as CSV")
    _add_doctor(commands)
    _add_parity(commands)
    _add_import_config(commands)
    return parser


# argparse has no public name for it.
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_Run = Callable[[Sweep, argparse.Namespace], int]


def _add(commands: _Commands, name: str, run: _Run, text: str, more: str = "") -> argparse.ArgumentParser:
    description = f"{text[0].upper()}{text[1:]}. {more}".strip()
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=description)
    command.add_argument("directory", type=Path, metavar="DIR", help="a sweep directory, for example runs/default")
    command.set_defaults(run=lambda options: run(Sweep.read(options.directory), options))
    return command


def _add_status(commands: _Commands) -> None:
    more = (
        "What needs a look comes first. States: failed, interrupted (goes on from its checkpoint when run again), "
        "running, submitted (its Slurm job has not begun it), planned, non-finite (parameters overflowed: a result), "
        "completed. Works while the sweep runs, from any machine that sees the directory."
    )
    command = _add(commands, "status", _status, "show the state of every cell", more)
    command.add_argument("--watch", action="store_true", help="refresh every 2 s until nothing runs or waits")
    command.add_argument("--state", metavar="STATE[,STATE]", help="only cells in these states, as in failed,running")


def _add_logs(commands: _Commands) -> None:
    more = "Where the cell has no log because its Slurm job ended before, the log of the job is printed."
    command = _add(commands, "logs", _logs, "print what a cell printed", more)
    command.add_argument("cell", nargs="+", metavar="CELL", help=CELL)
    command.add_argument("--job", action="store_true", help="the log of its Slurm job instead")
    command.add_argument("--attempt", type=_count, metavar="N", help="what attempt N printed")
    command.add_argument("--lines", type=_count, metavar="N", help="only the last N lines")
    command.add_argument("--follow", action="store_true", help="go on with what is appended until the cell has ended")


def _add_cancel(commands: _Commands) -> None:
    more = (
        "Slurm jobs of this sweep that run or wait are cancelled; a local launcher on this machine is asked to stop. "
        "Running cells save a checkpoint."
    )
    command = _add(commands, "cancel", _cancel, "end what runs or waits", more)
    command.add_argument("cells", nargs="*", metavar="CELL", help=CELLS)
    command.add_argument("--whole-job", action="store_true", help="also when a job holds other unfinished cells")


def _add_retry(commands: _Commands) -> None:
    more = (
        "Failed, interrupted and never begun cells go on from their checkpoint, with the configuration they were "
        "planned with, by the launcher that had them last and its options."
    )
    command = _add(commands, "retry", _retry, "run unfinished cells again", more)
    command.add_argument("cells", nargs="*", metavar="CELL", help=CELLS)
    command.add_argument("--launcher", metavar="local|slurm", help="where to run; default: as last time")
    command.add_argument("--fresh", action="store_true", help="start the named cells over, finished or not")
    command.add_argument("--no-wait", action="store_true", help="submit to Slurm and return")
    command.add_argument("--workers", type=_count, metavar="N", help="cells at a time with the local launcher")


def _add_doctor(commands: _Commands) -> None:
    more = (
        "Reads the records of a sweep, or of one cell: log-probs that are missing, samplers that draw from another "
        "distribution than they log, caches that are not cleared, versions that go backwards, and the like. Exit code "
        "1 when something is found, 2 when the directory cannot be read."
    )
    text = "say what is wrong between sampler and trainer"
    command = commands.add_parser("doctor", help=text, description=f"{text[0].upper()}{text[1:]}. {more}")
    command.add_argument("directory", type=Path, metavar="DIR", help="a sweep directory, or one cell's")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_doctor)


def _add_parity(commands: _Commands) -> None:
    more = (
        "A golden file holds a framework's options, a batch, and the loss, gradient, weights and masks that its own "
        "code gave; it is evaluated through the options. Exit code 1 when a file is missed, 2 when one cannot be read."
    )
    text = "compare with golden files of other frameworks"
    command = commands.add_parser("parity", help=text, description=f"{text[0].upper()}{text[1:]}. {more}")
    command.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="golden files")
    command.set_defaults(run=_parity)


def _add_import_config(commands: _Commands) -> None:
    more = (
        "Known algorithm options are taken from wherever that framework keeps them; what concerns other parts is "
        "reported, and an algorithm option that has no counterpart is refused."
    )
    text = "turn another framework's configuration into overrides"
    command = commands.add_parser("import-config", help=text, description=f"{text[0].upper()}{text[1:]}. {more}")
    command.add_argument("file", type=Path, metavar="CONFIG.yaml", help="its configuration, as one YAML file")
    command.add_argument("--framework", required=True, metavar="NAME", help="skyrl, verl, trl, …")
    command.add_argument("--sweep", metavar="NAME", help="also write sweeps/NAME.yaml, which runs it")
    command.set_defaults(run=_import_config)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not possible. Legal: a whole number of at least 1.")
    return int(text)


def _status(sweep: Sweep, options: argparse.Namespace) -> int:
    from stalefront.commands.status import status

    return status(sweep, states=options.state, watch=options.watch)


def _logs(sweep: Sweep, options: argparse.Namespace) -> int:
    from stalefront.commands.logs import logs

    cell_id = sweep.find(" ".join(options.cell))
    return logs(sweep, cell_id, of_job=options.job, attempt=options.attempt, lines=options.lines, follow=options.follow)


def _cancel(sweep: Sweep, options: argparse.Namespace) -> int:
    from stalefront.commands.cancel import cancel

    return cancel(sweep, [sweep.find(text) for text in options.cells], whole_job=options.whole_job)


def _retry(sweep: Sweep, options: argparse.Namespace) -> int:
    from stalefront.commands.retry import retry

    cell_ids = [sweep.find(text) for text in options.cells]
    launcher, fresh, workers = options.launcher, options.fresh, options.workers
    return retry(sweep, cell_ids, launcher=launcher, fresh=fresh, wait=not options.no_wait, workers=workers)


def _report(sweep: Sweep, options: argparse.Namespace) -> int:
    from stalefront.analysis.report import build_report
    from stalefront.commands.retry import settle_first

    settle_first(sweep)
    build_report(options.directory)
    print(options.directory / "report.html")
    return 0


def _table(sweep: Sweep, options: argparse.Namespace) -> int:
    from stalefront.analysis.tables import build_table, write_table

    sys.stdout.write(write_table(build_table(options.directory).table).decode())
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from stalefront.commands.doctor import doctor

    return doctor(options.directory, as_json=options.json)


def _parity(options: argparse.Namespace) -> int:
    from stalefront.commands.parity import parity

    return parity(options.files)


def _import_config(options: argparse.Namespace) -> int:
    from stalefront.commands.import_config import import_config

    return import_config(options.framework, options.file, sweep=options.sweep)


if __name__ == "__main__":
    sys.exit(main())
