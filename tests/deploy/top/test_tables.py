"""deploy/local/top/tables.py: the tables next to the workers', and plain texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deploy.local.top import tables
from deploy.local.top.tables import LINES_KEPT, TEXT_KEPT, Bar, plain
from shared.messages.frontends import RecentRequests
from shared.messages.people import ModelState, RouterState, SourceState
from tests.deploy.top.views import card, entry, load, look, store, way, worker


@given(st.text())
def test_a_plain_text_cannot_act_on_a_terminal_and_is_cut(text: str) -> None:
    shown = plain(text)
    assert len(shown) <= TEXT_KEPT
    assert not any(each in shown for each in "\x1b\x00\n\r\t\x7f\x9b\u202e\u2028\u200b")


def test_letters_of_any_writing_stay() -> None:
    assert plain("Qwen 漢字 é [bold]") == "Qwen 漢字 é [bold]"
    assert plain("\x1b[31mred\x07\u202e") == "[31mred"
    assert plain("x" * 500) == "x" * (TEXT_KEPT - 1) + "…"


def test_tiers_have_their_hit_rates_and_a_silent_store_is_named() -> None:
    rows = look(entry("kvbm", "k1") | entry("kvbm", "k2")).overview.instances
    shown = tables.tiers(rows, {"k1": store("k1", reason="no room")}, 3, old=False)
    assert [line.cells for line in shown.lines] == [
        ("k1", "host", "on: no room", Bar(0, 40, 100), "50 %", "m"),
        ("k2", "", "silent", Bar(), "-", ""),
    ]
    assert shown.left_out == 3
    assert tables.tiers(rows, {"k1": store("k1", None)}, 0, old=False).lines[0].cells[4] == "-"
    unused = tables.tiers(rows, {"k1": store("k1", layouts=0)}, 0, old=False).lines[0]
    assert unused.cells == ("k1", "", "no engine uses it", Bar(), "-", "")


def test_only_requests_that_went_on_elsewhere_are_migrations_latest_first() -> None:
    ways = [way("old", "w1", "w2", age_s=90.0, outcome="stop"), way("one", "w1", attempt=1), way("new", "w2", "w3")]
    shown = tables.migrations({"f1": RecentRequests("f1", 0, 1, 3, ways)}, 0.0)
    assert [line.cells for line in shown.lines] == [
        ("1s", "new", "m", "w2 > w3", "2", "runs"),
        ("1m", "old", "m", "w1 > w2", "2", "stop"),
    ]
    assert tables.migrations({"f1": RecentRequests("f1", 0, 1, 3, ways)}, 60.0).lines[0].cells[0] == "1m"


def test_tables_are_bounded_and_say_what_they_leave_out() -> None:
    ways = [way(f"r{number}", "w1", "w2") for number in range(100)]
    shown = tables.migrations({"f1": RecentRequests("f1", 0, 0, 100, ways)}, 0.0)
    assert (len(shown.lines), shown.left_out) == (LINES_KEPT, 100 - LINES_KEPT)
    values = {key: each for number in range(50) for key, each in worker(f"w{number}", model=f"m{number}").items()}
    shown = tables.models(look(values).overview.models, {}, old=False)
    assert (len(shown.lines), shown.left_out) == (LINES_KEPT, 50 - LINES_KEPT)
    rows = look(entry("kvbm", "k1")).overview.instances
    assert len(tables.tiers(rows, {"k1": store("k1", layouts=99)}, 0, old=False).lines) == LINES_KEPT


def test_models_have_the_blocks_of_workers_whose_load_is_known() -> None:
    rows = look(worker("w1") | worker("w2") | card("w1", "other")).overview.models
    shown = tables.models(rows, {"w1": load("w1", held=30, cached=20)}, old=True)
    assert shown.lines[0].cells == ("m", "2", "2048", "0", Bar(30, 20, 200))
    assert shown.lines[0].old


def test_services_say_what_they_do_or_that_they_are_silent() -> None:
    rows = look(entry("frontend", "f1") | entry("router", "r1") | entry("router", "r2")).overview.instances
    state = RouterState("r1", "kv", [ModelState("m", 1, 4, 50, 100)], [SourceState("w1", "live")])
    shown = tables.services(rows, {"r1": state}, {"f1": RecentRequests("f1", 1, 2, 9, [])}, 5, old=False)
    assert [(line.cells[1], line.cells[2], line.cells[4]) for line in shown.lines] == [
        ("f1", "ready", "3 running, 9 begun"),
        ("r1", "ready", "policy kv, 4 reserved, 50 blocks, events 1 live"),
        ("r2", "silent", ""),
    ]
    assert shown.left_out == 5
