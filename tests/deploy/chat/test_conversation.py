"""deploy/local/chat/conversation.py: what is asked with a question, and what a line means."""

from __future__ import annotations

import pytest

from deploy.local.chat.conversation import HELP, Conversation, read_line
from shared.errors import ConfigError


def test_a_question_is_asked_with_what_was_said_before() -> None:
    conversation = Conversation("Be short.")
    conversation.keep("One?", "1")
    conversation.keep("stopped at once", "")
    assert conversation.messages("Two?") == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    conversation.clear()
    conversation.system = ""
    assert conversation.messages("Two?") == [{"role": "user", "content": "Two?"}]


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("Hello there \n", ("", "Hello there")),
        ("", ("", "")),
        (" /etc/passwd is what?", ("", "/etc/passwd is what?")),
        ("/clear", ("/clear", "")),
        ("/model  ORG/name ", ("/model", "ORG/name")),
        ("/system Be short. And kind.", ("/system", "Be short. And kind.")),
    ],
)
def test_a_line_is_a_command_or_a_question(line: str, read: tuple[str, str]) -> None:
    assert read_line(line) == read


def test_every_command_of_the_help_is_one() -> None:
    assert [read_line(command)[0] for command in HELP] == [command.split()[0] for command in HELP]


@pytest.mark.parametrize("line", ["/quit", "/models", "/", "/etc/passwd is what?"])
def test_another_command_is_refused_and_said(line: str) -> None:
    with pytest.raises(ConfigError, match=f"{line.split()[0]}: no such command; /help shows them"):
        read_line(line)
