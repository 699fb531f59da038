"""A view and the size of a terminal → what Rich draws. Pure.

head       namespace, sums of all workers       at most a third of the rows
notes      what is wrong                        3 lines
workers    one line each, from the offset on    what is left
others     tiers, migrations, models, services  4 lines each, more if there is room, none if there is not
foot       which workers these are, keys        1 line
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from deploy.local.top.keys import ORDERS
from deploy.local.top.model import View
from deploy.local.top.tables import Bar, Heading, Line, Listing

NOTES_SHOWN = 3
OTHER_LINES = 3
"""Lines of each of the other tables, while workers wait for room."""
FEWEST_WORKERS = 8
"""Workers that are shown before any other table gets a line."""
TEXT_WIDTH = 28
"""Columns of a text, while others of its line need room."""
BAR_WIDTH = 10
"""Columns of a bar at least."""
STATES = {
    **{"ready": "green", "on": "green", "starting": "cyan", "runs": "cyan", "scanning": "cyan"},
    **{"draining": "yellow", "drained": "yellow", "asleep": "blue", "quarantined": "yellow"},
    **{"silent": "red", "gone": "red", "off": "red", "error": "red"},
}
"""The first word of a cell in a column of states → its style."""
STATE_TITLES = ("STATE", "END")
HELP = (
    "s          next order: " + ", ".join(ORDERS),
    "r          the order turned round",
    "/          filter workers: name, state, model, device, machine; Enter keeps it, Esc clears it",
    "↑ ↓        scroll by a worker; PgUp, PgDn by a page; Home, End",
    "? or h     this help; Esc leaves it",
    "q, Ctrl-C  end",
    "",
    "BLOCKS     in use, then reusable, then free",
    "USED       the share of the worker's blocks that running sequences use",
    "streams    requests at the frontends; hits: share of prompt tokens found cached, by tier",
)


class Space(Struct, frozen=True):
    """How many rows each part of a view has."""

    head: int
    notes: int
    page: int
    """The number of workers."""
    others: tuple[int, ...]
    """The lines of each other table. 0 if it is not shown."""


def space(view: View, columns: int, rows: int) -> Space:
    """Return how the rows of a terminal are shared out."""
    head = min(len(_flowed(view.head, columns)), max(1, rows // 3))
    left = rows - head - 3  # the bar of all blocks, the heads of the workers, the foot
    notes = max(0, min(len(view.notes) + (view.notes_left_out > 0), NOTES_SHOWN, left // 4))
    left -= notes
    page = max(0, min(len(view.workers.lines), FEWEST_WORKERS, left))
    left -= page
    others = []
    for each in view.others:
        wanted = min(_height(each), OTHER_LINES)
        others.append(wanted if wanted + 2 <= left else 0)
        left -= wanted + 2 if others[-1] else 0
    more = max(0, min(len(view.workers.lines) - page, left))
    left -= more
    for number, each in enumerate(view.others):
        grown = max(0, min(_height(each) - others[number], left)) if others[number] else 0
        others[number] += grown
        left -= grown
    return Space(head, notes, page + more, tuple(others))


def render(view: View, columns: int, rows: int) -> RenderableType:
    """Return what fills a terminal of this size at most."""
    room = space(view, columns, rows)
    parts: list[RenderableType] = [_line(each, "bold") for each in _flowed(view.head, columns)[: room.head]]
    parts.append(_fill(view.fill))
    if view.controls.help:
        parts += [_line(each) for each in HELP]
        return Group(*parts[: max(0, rows - 1)], _foot(view, room))
    shown, more = _cut(len(view.notes), room.notes, view.notes_left_out)
    parts += [*(_line(f"! {each}", "yellow") for each in view.notes[:shown]), *more]
    parts.append(_table(view.workers.headings, view.workers.lines[: room.page], columns))
    for each, height in zip(view.others, room.others, strict=True):
        shown, more = _cut(len(each.lines), height, each.left_out)
        if height:
            parts += ["", _table(each.headings, each.lines[:shown], columns), *more]
    if rows <= 3:
        return Group(*parts[:1])
    used = room.head + 3 + room.notes + room.page + sum(each + 2 for each in room.others if each)
    return Group(*parts, *([""] * (rows - used)), _foot(view, room))


def _height(table: Listing) -> int:
    return len(table.lines) + (table.left_out > 0)


def _flowed(texts: Sequence[str], columns: int) -> list[str]:
    """Return short texts in as few lines as they take."""
    lines: list[str] = []
    for text in texts:
        joined = f"{lines[-1]}   {text}" if lines else text
        if lines and cell_len(joined) <= columns:
            lines[-1] = joined
        else:
            lines.append(text)
    return lines


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _cut(count: int, height: int, left_out: int) -> tuple[int, list[Text]]:
    """Return how many of some lines are shown in a height, and a line that says how many are not."""
    shown = count if count + (left_out > 0) <= height else max(min(count, height, 1), height - 1)
    more = count - shown + left_out
    return shown, [_line(f"… {more} more", "dim")] if more and shown < height else []


def _fill(bar: Bar) -> RenderableType:
    table = Table.grid(expand=True, padding=(0, 1, 0, 0))
    table.add_column(ratio=1, no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row(LoadBar(bar), _line(f"{bar.held} used, {bar.cached} cached of {bar.total} blocks"))
    return table


def _foot(view: View, room: Space) -> Text:
    controls, end = view.controls, min(view.offset + room.page, view.chosen)
    if controls.typing:
        return _line(f"filter: {controls.filter}_   Enter keeps it, Esc clears it", "reverse")
    order = ORDERS[controls.order] + (", turned round" if controls.reversed else "")
    filtered = f" with “{controls.filter}”" if controls.filter else ""
    some = f"{view.offset + 1 if end else 0}-{end} of {view.chosen}{filtered} by {order}"
    followed = f", {view.workers.left_out} of {view.all} not followed" if view.workers.left_out else ""
    return _line(f"workers {some}{followed}   q quit  s sort  r reverse  / filter  ? help", "reverse")


def _table(headings: Sequence[Heading], lines: Sequence[Line], columns: int) -> Table:
    widths = _widths(headings, lines, columns)
    drawn = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for number, width in widths.items():
        side: Literal["left", "right"] = "right" if headings[number].number else "left"
        drawn.add_column(Text(headings[number].title), justify=side, width=width, no_wrap=True, overflow="ellipsis")
    for line in lines:
        cells = (_cell(headings[number].title, line.cells[number]) for number in widths)
        drawn.add_row(*cells, style="dim" if line.old else None)
    return drawn


def _cell(title: str, cell: str | Bar) -> RenderableType:
    if isinstance(cell, Bar):
        return LoadBar(cell)
    return Text(cell, STATES.get(cell.split(" ")[0].rstrip(":"), "") if title in STATE_TITLES else "")


def _widths(headings: Sequence[Heading], lines: Sequence[Line], columns: int) -> dict[int, int]:
    """Return the number of each column that has room, and that has texts → its width."""
    wanted = {
        number: max([cell_len(heading.title), *(_width(line.cells[number]) for line in lines)])
        for number, heading in enumerate(headings)
        if not lines or any(line.cells[number] != "" for line in lines)
    }
    bars = [number for number in wanted if any(isinstance(line.cells[number], Bar) for line in lines)]
    widths = {number: min(width, TEXT_WIDTH) for number, width in wanted.items()}
    for number in sorted(wanted, key=lambda number: -headings[number].spare):
        if sum(widths.values()) + len(widths) - 1 > columns and headings[number].spare:
            del widths[number]
    room = columns - sum(widths.values()) - len(widths) + 1
    for number in [*bars, *widths]:
        if number in widths and room > 0:
            more = room if number in bars else min(room, wanted[number] - widths[number])
            widths[number] += more
            room -= more
    for _ in range(max(0, -room)):
        widest = max(widths, key=lambda number: widths[number])
        widths[widest] = max(1, widths[widest] - 1)
    return widths


def _width(cell: str | Bar) -> int:
    return BAR_WIDTH if isinstance(cell, Bar) else cell_len(cell)


class LoadBar:
    """A bar of blocks in use, reusable and free, as wide as its place."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, total = options.max_width, self._bar.total
        if total <= 0:
            yield Segment(" " * width)
            return
        held = min(max(0, self._bar.held), total)
        cached = min(max(0, self._bar.cached), total - held)
        ends = [-(-width * held // total), -(-width * (held + cached) // total), width]
        used = "green" if 10 * held < 7 * total else "yellow" if 10 * held < 9 * total else "red"
        begin = 0
        for end, sign, style in zip(ends, "#=." if options.ascii_only else "█▒·", (used, "cyan", "dim"), strict=True):
            yield Segment(sign * (end - begin), Style.parse(style))
            begin = end
