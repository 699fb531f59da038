"""Answers to probes, requests and streams, and the limit of probes."""

from __future__ import annotations

from functools import partial

import pytest

from shared.bus.contract import Message
from shared.bus.inbox import NO_RESPONDERS, PROBE_LIMIT, ReplyInbox
from shared.errors import BusDown


def nobody(reply: str) -> Message:
    return Message(reply, b"", headers=NO_RESPONDERS)


def test_over_the_bound_the_oldest_probe_is_forgotten() -> None:
    replies = ReplyInbox()
    gone: list[int] = []
    inboxes = [replies.probe(partial(gone.append, number)) for number in range(PROBE_LIMIT + 1)]
    replies.validate()
    for inbox in inboxes:
        replies.deliver(nobody(inbox))
    assert gone == list(range(1, PROBE_LIMIT + 1))


def test_a_probe_that_was_answered_is_over() -> None:
    replies = ReplyInbox()
    gone: list[str] = []
    inbox = replies.probe(lambda: gone.append("gone"))
    replies.deliver(Message(inbox, b"here"))
    replies.deliver(nobody(inbox))
    assert gone == []


def test_a_lost_connection_does_not_say_gone() -> None:
    replies = ReplyInbox()
    gone: list[str] = []
    replies.probe(lambda: gone.append("gone"))
    replies.fail(BusDown("lost"))
    assert gone == []


async def test_only_the_first_answer_to_a_request_counts() -> None:
    replies = ReplyInbox()
    inboxes: list[str] = []

    async def send(inbox: str) -> None:
        inboxes.append(inbox)
        replies.deliver(Message(inbox, b"first"))
        replies.deliver(Message(inbox, b"second"))
        replies.fail(BusDown("lost"))

    assert (await replies.request("subject", 1.0, send)).payload == b"first"
    replies.deliver(Message(inboxes[0], b"late"))


async def test_a_stream_gives_what_came_before_the_connection_was_lost() -> None:
    replies = ReplyInbox()
    stream = replies.stream("subject", pending_limit=8)
    messages = stream.messages(1.0)
    stream.deliver(Message(stream.inbox, b"first"))
    replies.fail(BusDown("lost"))
    assert (await anext(messages)).payload == b"first"
    with pytest.raises(BusDown):
        await anext(messages)


def test_reply_subjects_begin_with_the_inbox_that_was_asked_for() -> None:
    replies = ReplyInbox("_INBOX_services")
    assert replies.probe(lambda: None).startswith("_INBOX_services.")
    assert replies.stream("subject", 1).inbox.startswith("_INBOX_services.")
