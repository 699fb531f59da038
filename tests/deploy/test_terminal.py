"""deploy/local/terminal.py: a bar on a terminal, and lines in a file."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest

from deploy.local.terminal import Terminal, highlight, paint

SHOWN = "MODEL  KV BLOCKS\nm      3\nnote: NATS is away\nA sentence\n"


class Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_that_is_drawn_again_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    for share in (0.0, 0.5, 1.0):
        terminal.progress("fetching org/name", share)
    terminal.clear()
    drawn = screen.getvalue().split("\r\033[K")
    assert drawn == [
        f"fetching org/name:   0% [{' ' * 30}]",
        f"fetching org/name:  50% [{'#' * 15}{' ' * 15}]",
        f"fetching org/name: 100% [{'#' * 30}]",
        "",
    ]


@pytest.mark.parametrize(("columns", "bar"), [("40", " [######       ]"), ("27", ""), ("10", "")])
def test_a_narrow_terminal_has_a_shorter_bar_or_none(columns: str, bar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", columns)
    Terminal().progress("fetching org/name", 0.5)
    assert screen.getvalue() == f"fetching org/name:  50%{bar}"


def test_elsewhere_there_is_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    for percent in range(0, 101, 5):
        terminal.progress("fetching", percent / 100)
    assert capsys.readouterr().err.splitlines() == [f"fetching: {tenth * 10} %" for tenth in range(11)]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as screen:
        yield screen
    os.close(master)


def test_a_terminal_has_colours_in_heads_and_remarks(terminal: TextIO) -> None:
    assert paint("error:", "red", terminal) == "\033[31merror:\033[0m"
    assert highlight(SHOWN, terminal) == (
        "\033[1mMODEL  KV BLOCKS\033[0m\nm      3\n\033[33mnote:\033[0m NATS is away\nA sentence\n"
    )


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_the_environment_turns_colours_off(
    terminal: TextIO, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert highlight(SHOWN, terminal) == SHOWN


def test_a_pipe_has_no_colours() -> None:
    assert highlight(SHOWN, io.StringIO()) == SHOWN


def test_a_line_whose_reader_has_ended_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stderr", stream)
        Terminal().notice("stopping")
        monkeypatch.undo()
        with pytest.raises(BrokenPipeError):
            stream.flush()
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), writer)
