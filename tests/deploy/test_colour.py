"""deploy/local/colour.py on a real terminal, and elsewhere."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import TextIO

import pytest

from deploy.local.colour import highlight, paint

SHOWN = "MODEL  KV BLOCKS\nm      3\nnote: NATS is away\nA sentence\n"


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
