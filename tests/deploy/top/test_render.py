"""deploy/local/top/render.py: a view at any size of a terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from deploy.local.top.keys import ORDERS, Controls
from deploy.local.top.model import Known, View
from deploy.local.top.render import LoadBar, render, space
from deploy.local.top.tables import Bar
from shared.messages.frontends import RecentRequests
from tests.deploy.top.views import entry, load, look, store, way, worker

NONE = Controls()
SIZES = st.tuples(st.integers(1, 200), st.integers(1, 60))


def fleet(workers: int, notes: int = 0, controls: Controls = NONE, name: str = "w{:04}", model: str = "m") -> View:
    values = entry("kvbm", "k1") | entry("frontend", "f1") | entry("router", "r1")
    for number in range(workers):
        values |= worker(name.format(number), model=model)
    loads = [load(name.format(number), held=number % 101, cached=7, running=number) for number in range(workers)]
    recent = [RecentRequests("f1", 0, 1, 1, [way(f"r{number}", "a", "b") for number in range(9)])]
    known = Known()
    found = look(values, loads, stores=[store("k1")], recent=recent, notes=[f"note {each}" for each in range(notes)])
    known.learn(found, {}, (), 10.0)
    return known.view(controls, "12:00:00")


def drawn(view: View, columns: int, rows: int, encoding: str = "utf-8", **options: object) -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    console = Console(file=file, width=columns, height=rows, **options)  # type: ignore[arg-type]
    console.print(render(view, columns, rows), end="")
    file.seek(0)
    return file.read().rstrip("\n").split("\n")


@given(SIZES, st.integers(0, 80), st.integers(0, 9), st.booleans(), st.booleans())
def test_any_view_fits_any_terminal(size: tuple[int, int], workers: int, notes: int, asked: bool, typing: bool) -> None:
    view = fleet(workers, notes, Controls(help=asked, typing=typing, offset=workers // 2))
    lines = drawn(view, *size)
    assert len(lines) <= size[1]
    assert max(map(cell_len, lines)) <= size[0]
    assert space(view, *size).page <= len(view.workers.lines)


def test_eighty_columns_have_room_for_what_matters() -> None:
    lines = drawn(fleet(5), 80, 24)
    assert len(lines) == 24
    text = "\n".join(lines)
    for each in ("WORKER", "STATE", "MODEL", "RUN", "WAIT", "TOK/S", "BLOCKS", "KVBM", "HITS", "50 %", "a > b", "█"):
        assert each in text
    assert lines[-1].startswith("workers 1-5 of 5 by worker   q quit")


def test_forty_columns_and_ten_rows_have_the_workers() -> None:
    lines = drawn(fleet(50, notes=3), 40, 10)
    assert len(lines) <= 10
    assert any(line.startswith("w0000") for line in lines)
    assert any(line.startswith("! note 0") for line in lines)


def test_the_view_says_which_workers_are_shown() -> None:
    view = fleet(2000, controls=Controls(order=ORDERS.index("running"), offset=100, filter="w"))
    lines = drawn(view, 100, 30)
    page = space(view, 100, 30).page
    assert lines[-1].startswith(f"workers 101-{100 + page} of 2000 with “w” by running")
    assert any(line.startswith("w1899 ") for line in lines)


def test_more_rows_show_more_workers_and_then_more_of_the_rest() -> None:
    pages = [space(fleet(40), 80, rows).page for rows in (5, 10, 24, 40, 100)]
    assert pages == sorted(pages)
    assert pages[-1] == 40
    assert space(fleet(3), 80, 100).others[1] == 9, "all migrations"
    assert "… 7 more" in "\n".join(drawn(fleet(40), 80, 40)), "three lines, of which one says how many more"


def test_what_is_typed_as_a_filter_is_shown_and_the_help_names_the_keys() -> None:
    assert drawn(fleet(3, controls=Controls(typing=True, filter="ab[c")), 80, 24)[-1].startswith("filter: ab[c_ ")
    text = "\n".join(drawn(fleet(3, controls=Controls(help=True)), 80, 24))
    assert all(order in text for order in ORDERS)
    assert "Ctrl-C" in text


def test_names_are_no_markup_and_long_ones_are_cut() -> None:
    view = fleet(2, model="[bold red]:smile:" + "x" * 300)
    text = "\n".join(drawn(view, 120, 30, force_terminal=True, color_system="truecolor"))
    assert "[bold red]:smile:" in text
    assert "…" in text


def test_without_colours_the_bars_still_differ() -> None:
    plain = "\n".join(drawn(fleet(30), 80, 24, force_terminal=True, no_color=True, color_system="truecolor"))
    assert "\x1b[3" not in plain
    assert {"█", "▒", "·"} < set(plain)


def test_an_ascii_terminal_gets_ascii() -> None:
    text = "\n".join(drawn(fleet(30), 80, 24, encoding="ascii"))
    assert text.isascii()
    assert "#" in text


@pytest.mark.parametrize(
    ("bar", "expected"),
    [
        (Bar(0, 0, 100), "··········"),
        (Bar(1, 0, 1000), "█·········"),
        (Bar(50, 20, 100), "█████▒▒···"),
        (Bar(100, 0, 100), "██████████"),
        (Bar(10**30, -5, 100), "██████████"),
        (Bar(-3, 200, 100), "▒▒▒▒▒▒▒▒▒▒"),
        (Bar(5, 5, 0), "          "),
        (Bar(5, 5, -7), "          "),
    ],
)
def test_bars(bar: Bar, expected: str) -> None:
    console = Console(file=io.StringIO(), width=10)
    [line] = console.render_lines(LoadBar(bar))
    assert "".join(segment.text for segment in line) == expected
