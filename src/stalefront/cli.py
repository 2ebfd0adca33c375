"""The command `stalefront`: looks at sweep directories. Training is started by `python sweep.py`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stalefront.files import read_json
from stalefront.labels import only, varying
from stalefront.observe import Observed, observe
from stalefront.paths import SweepPaths

WATCH_EVERY_S = 2.0
NO_TERMINAL_WIDTH = 200
# In the order of the table: what needs a look comes first.
STATE_STYLES = {
    **{"failed": "red", "interrupted": "yellow", "running": "cyan"},
    **{"submitted": "", "planned": "dim", "non-finite": "magenta", "completed": ""},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code."""
    options = _parser().parse_args(arguments)
    if not SweepPaths(options.directory).plan.is_file():
        print(
            f"error: {options.directory} is no sweep directory: it holds no plan.json. "
            "Give the folder that python sweep.py wrote, for example runs/default.",
            file=sys.stderr,
        )
        return 2
    code: int = options.run(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stalefront", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("report", _report, "build the report anew from the recorded files"),
        ("table", _table, "print the run table, one row a planned cell, as CSV"),
        ("status", _status, "show the state of every cell"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("directory", type=Path, metavar="DIR", help="a sweep directory, for example runs/default")
        command.set_defaults(run=run)
        if name == "status":
            command.add_argument("--watch", action="store_true", help="go on until nothing runs, or Ctrl-C")
    return parser


def _report(options: argparse.Namespace) -> int:
    from stalefront.analysis.report import build_report

    build_report(options.directory)
    print(options.directory / "report.html")
    return 0


def _table(options: argparse.Namespace) -> int:
    from stalefront.analysis.tables import build_table, write_table

    sys.stdout.write(write_table(build_table(options.directory).table).decode())
    return 0


def _status(options: argparse.Namespace) -> int:
    console = Console() if sys.stdout.isatty() else Console(width=NO_TERMINAL_WIDTH)
    if not options.watch:
        console.print(status_table(options.directory)[0])
        return 0
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                shown, going_on = status_table(options.directory)
                live.update(shown, refresh=True)
                if not going_on:
                    return 0
                time.sleep(WATCH_EVERY_S)
    except KeyboardInterrupt:
        return 130


def status_table(directory: Path) -> tuple[RenderableType, bool]:
    """Table of all planned cells with their counts, and whether any of them runs."""
    paths = SweepPaths(directory)
    plan: dict[str, Any] = read_json(paths.plan)
    rows = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("cell", "state", "attempt", "step", "of", "reward", "overrides"):
        rows.add_column(name, justify="right" if name in ("attempt", "step", "of", "reward") else "left")
    entries: dict[str, Any] = plan["cells"]
    keys = varying([entry["overrides"] for entry in entries.values()])
    seen = {cell_id: observe(paths.cell(cell_id)) for cell_id in entries}
    for cell_id in sorted(seen, key=lambda one: list(STATE_STYLES).index(seen[one].state)):
        rows.add_row(*_row(cell_id, seen[cell_id], entries[cell_id], keys))
    counts = Counter(one.state for one in seen.values())
    text = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    head = Text(f"{plan['sweep'].get('name', directory.name)}: {text}", style="bold")
    return Group(head, rows), any(one.live for one in seen.values())


def _row(cell_id: str, seen: Observed, entry: dict[str, Any], keys: set[str]) -> tuple[str | Text, ...]:
    reward = "" if seen.reward_val is None else f"{seen.reward_val:.2f}"
    state = Text(seen.state, style=STATE_STYLES[seen.state])
    what = " ".join(only(keys, entry["overrides"])) + (f"  ({seen.reason})" if seen.reason else "")
    attempt = str(seen.attempt) if seen.attempt else ""
    return cell_id, state, attempt, str(seen.step), str(entry["cell"]["steps"]), reward, what


if __name__ == "__main__":
    sys.exit(main())
