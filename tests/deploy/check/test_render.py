"""deploy/local/check/render.py: what people see, at 80 columns and others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deploy.local.check.render import MOST_COLUMNS, counted, plain, render
from deploy.local.check.verdicts import Verdict, verdicts
from tests.deploy.check.measured import BUS, WELL


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    shown = render(verdicts(WELL), columns)
    assert max(map(len, shown.splitlines())) <= columns


def test_a_line_of_the_result_is_as_the_documents_show_it() -> None:
    found = replace(WELL, bus=replace(BUS, max_payload_bytes=1 << 20, echoed_bytes=0))
    shown = render(verdicts(found), 80)
    assert (
        "warn     NATS payload: max_payload 1 MiB, nats.payload_limit_bytes 4 MiB\n"
        "         Prompts of more than some 262,144 tokens, and larger bodies of NATS\n"
        "         clients, are refused. The server counts headers too: a message that is\n"
    ) in shown
    assert "\n         set: max_payload: 5MB in the file of nats-server; or, to refuse\n" in shown
    assert shown.endswith("\n\n26 ok, 1 warn, 0 bad, 2 skipped")


def test_a_very_wide_terminal_has_lines_that_can_be_read() -> None:
    assert max(map(len, render(verdicts(WELL), 400).splitlines())) <= MOST_COLUMNS


def test_what_a_peer_chose_cannot_move_the_cursor_and_is_cut_off() -> None:
    shown = render([Verdict("peer", "bad", "\x1b[2J" + "x" * 10_000, "y\r\n.\x07", "")], 80)
    assert shown.replace("\n", "").isprintable()
    assert len(shown) < 1000


@given(st.text())
def test_plain_text_is_printable(text: str) -> None:
    assert plain(text).isprintable()


def test_each_state_is_counted() -> None:
    assert counted([]) == "0 ok, 0 warn, 0 bad, 0 skipped"
