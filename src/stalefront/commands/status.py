"""`stalefront status`: a row a cell, what needs a look first."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from stalefront.choice import OptionError
from stalefront.claims import launcher_runs
from stalefront.commands.columns import Column, Columns
from stalefront.commands.planned import SHOWN_BY_NAME, Sweep, bare
from stalefront.commands.snapshot import STATES, Row, Snapshot, launchers, look_at_queue, take_snapshot
from stalefront.labels import staleness

WATCH_EVERY_S = 2.0
# A look at the queue costs the controller something; looks at files cost only this machine.
QUEUE_EVERY_S = 5.0
STYLES = {
    **{"failed": "red", "interrupted": "yellow", "running": "cyan", "submitted": "blue"},
    **{"planned": "dim", "non-finite": "magenta", "completed": "green"},
}


def status(sweep: Sweep, *, states: str | None, watch: bool) -> int:
    """Print the table once, or keep it fresh until nothing runs or waits."""
    shown = parse_states(states)
    # Lines of a file or a pipe are as long as they are.
    console = Console(soft_wrap=not sys.stdout.isatty())
    if not watch:
        snapshot = take_snapshot(sweep, look_at_queue(sweep.paths))
        console.print(table(sweep, snapshot, shown))
        return 0
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        follow(sweep, live, shown)
    return 0


def parse_states(text: str | None) -> Sequence[str]:
    """States of a list with commas; all of them for None."""
    if text is None:
        return STATES
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in STATES:
            raise OptionError("--state", name, f"{', '.join(STATES)}, or several of them with commas between")
    return names


def follow(sweep: Sweep, live: Live, shown: Sequence[str]) -> None:
    """Refresh `live` until nothing runs or waits."""
    look = look_at_queue(sweep.paths)
    known: set[str] = set()
    while True:
        snapshot = take_snapshot(sweep, look)
        height = live.console.size.height if live.console.is_terminal else None
        live.update(table(sweep, snapshot, shown, height), refresh=True)
        # Between two cells of a launcher nothing runs, and it is not over.
        known |= launchers(sweep, snapshot.rows)
        unfinished = any(not row.seen.finished for row in snapshot.rows)
        if not snapshot.goes_on and not (unfinished and any(launcher_runs(one) for one in known)):
            return
        time.sleep(WATCH_EVERY_S)
        sweep = Sweep.read(sweep.paths.root)
        look = look if time.time() - look.taken < QUEUE_EVERY_S else look_at_queue(sweep.paths)


def table(sweep: Sweep, snapshot: Snapshot, states: Sequence[str], height: int | None = None) -> RenderableType:
    """Counts, the queue, and the rows of cells in one of `states`; only the first ones where `height` is short."""
    counts = ", ".join(f"{count} {state}" for state, count in snapshot.counts.items())
    head = [
        Text(f"{sweep.name}: {len(snapshot.rows)} {'cell' if len(snapshot.rows) == 1 else 'cells'}: {counts}", "bold")
    ]
    head += [Text(snapshot.look.text, "yellow" if snapshot.look.problem else "")] if snapshot.look.text else []
    rows = [row for row in snapshot.rows if row.state in states]
    # Beside the head: the names of the columns, how many are left out, and the line of the cursor.
    kept = rows if height is None else first(rows, max(1, height - len(head) - 3))
    more = [Text(f"… and {len(rows) - len(kept)} more", "dim")] if len(kept) < len(rows) else []
    none = [] if rows else [Text(f"no cell is {' or '.join(states)}", "dim")]
    return Group(*head, Columns(columns(sweep, kept)), *more, *none)


def first(rows: Sequence[Row], count: int) -> list[Row]:
    """At most `count` rows; old failures take no more than half of them from what goes on now."""
    ended = [row for row in rows if row.state in ("failed", "interrupted") and not row.goes_on]
    others = [row for row in rows if row.state not in ("failed", "interrupted") or row.goes_on]
    kept = ended[: max((count + 1) // 2, count - len(others))]
    return [*kept, *others[: count - len(kept)]]


def columns(sweep: Sweep, rows: Sequence[Row]) -> list[Column]:
    """Everything that is known of the cells; columns without a value are left out when they are drawn."""
    cells = [sweep.cells[row.cell_id]["cell"] for row in rows]
    states = [row.state for row in rows]
    rewards = ["" if row.seen.reward_val is None else f"{row.seen.reward_val:.2f}" for row in rows]
    rates = [f"{cell['optimizer']['lr']:g}" for cell in cells]
    return [
        Column("cell", [row.cell_id for row in rows]),
        Column("state", states, styles=[STYLES[state] for state in states]),
        Column("attempt", [str(row.seen.attempt or "") for row in rows], "right", yields=3),
        Column("step", [str(row.seen.step) if row.seen.attempt else "" for row in rows], "right"),
        Column("of", [str(cell["steps"]) for cell in cells], "right"),
        Column("reward", rewards, "right"),
        Column("S", [str(staleness(cell) or "") for cell in cells], "right"),
        Column("lr", rates, "right"),
        Column("seed", [str(cell["seed"]) for cell in cells], "right"),
        *_others(sweep, rows),
        Column("job", [row.job for row in rows], yields=1),
        Column("host", [row.seen.host for row in rows], yields=2),
        Column("reason", [row.reason for row in rows]),
    ]


def _others(sweep: Sweep, rows: Sequence[Row]) -> list[Column]:
    """One column for every other override that varies."""
    keys = {bare(key) for key in sweep.varying} - SHOWN_BY_NAME
    given = [{bare(key): value for key, _, value in _parted(sweep, row)} for row in rows]
    order = dict.fromkeys(key for values in given for key in values if key in keys)
    return [Column(key, [values.get(key, "") for values in given]) for key in order]


def _parted(sweep: Sweep, row: Row) -> list[tuple[str, str, str]]:
    return [override.partition("=") for override in sweep.cells[row.cell_id]["overrides"]]
