"""Rows in aligned columns for thousands of cells; `rich.table` needs a minute for ten thousand rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

GAP = "  "
# Of the last column, what is worth leaving out others for.
LAST_WIDTH = 30
NO_LIMIT = 10**9


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes
    ----------
    yields : int
        Columns are left out where a terminal is too narrow, the highest first; 0 never.
    """

    name: str
    values: Sequence[str]
    align: Literal["left", "right"] = "left"
    styles: Sequence[str] | None = None
    yields: int = 0

    @property
    def width(self) -> int:
        """Of its widest text."""
        return max(_width(text) for text in (self.name, *self.values))


@dataclass(frozen=True)
class Columns:
    """Columns of equal length, each as wide as its widest text; a terminal cuts the last one off at its edge."""

    columns: Sequence[Column]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        limit = options.max_width if console.is_terminal else None
        columns = [column for column in self.columns if any(column.values)]
        columns = columns if limit is None else fitting(columns, limit)
        widths = [column.width for column in columns]
        dim = Style.parse("dim")
        yield from _line([(column.name, dim) for column in columns], columns, widths, limit)
        styles = {name: Style.parse(name) for column in columns for name in set(column.styles or ())}
        for number in range(len(columns[0].values) if columns else 0):
            cells = [(c.values[number], styles[c.styles[number]] if c.styles else None) for c in columns]
            yield from _line(cells, columns, widths, limit)


def fitting(columns: Sequence[Column], limit: int) -> list[Column]:
    """Those columns that leave the last one room in `limit`."""
    kept = list(columns)
    while kept and sum(column.width + len(GAP) for column in kept[:-1]) + min(LAST_WIDTH, kept[-1].width) > limit:
        first = max(kept, key=lambda column: column.yields)
        if first.yields == 0:
            break
        kept.remove(first)
    return kept


def _line(
    cells: Sequence[tuple[str, Style | None]], columns: Sequence[Column], widths: Sequence[int], limit: int | None
) -> RenderResult:
    """Segments of one line; neighbours of one style are one segment."""
    left = NO_LIMIT if limit is None else limit
    text, style = "", None
    for place, ((value, own), column, width) in enumerate(zip(cells, columns, widths, strict=True)):
        padding = " " * (width - _width(value))
        is_last = place == len(columns) - 1
        padded = padding + value if column.align == "right" else value + ("" if is_last else padding)
        padded = padded if is_last else padded + GAP
        if _width(padded) > left:
            padded = set_cell_size(padded, max(0, left - 1)) + "…" if left else ""
        left -= _width(padded)
        if own is not style and text:
            yield Segment(text, style)
            text = ""
        text, style = text + padded, own
    yield Segment(text.rstrip(), style)
    yield Segment.line()


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)
