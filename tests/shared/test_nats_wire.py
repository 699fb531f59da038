from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import nats_wire
from shared.errors import ProtocolError
from shared.messaging import Message
from shared.nats_wire import Delivery, Info, Ping, Pong, Refusal, Said, Wire

TOKENS = st.from_regex(r"[a-z0-9_]{1,8}", fullmatch=True)
HEADERS = st.dictionaries(
    st.from_regex(r"[A-Za-z-]{1,10}", fullmatch=True), st.from_regex(r"[ -~]{0,20}", fullmatch=True).map(str.strip)
)
MESSAGES = st.builds(Message, TOKENS, st.binary(max_size=300), TOKENS | st.just(""), HEADERS)


def delivered(message: Message, sid: int) -> bytes:
    """As a server hands on what `publish` sent it: with the subscription's number behind the subject."""
    sent = nats_wire.publish(message.subject, message.reply, message.payload, message.headers)
    line, _, rest = sent.partition(b"\r\n")
    verb, subject, *others = line.split(b" ")
    verb = {b"PUB": b"MSG", b"HPUB": b"HMSG"}[verb]
    return b" ".join([verb, subject, str(sid).encode(), *others]) + b"\r\n" + rest


def heard(wire: Wire, *pieces: bytes) -> list[Said]:
    said: list[Said] = []
    for piece in pieces:
        said += wire.feed(piece)
        wire.validate()
    return said


@settings(max_examples=200, deadline=None)
@given(messages=st.lists(MESSAGES, max_size=5), cuts=st.lists(st.integers(0, 2000), max_size=8), between=st.booleans())
def test_what_is_published_is_delivered_however_the_bytes_are_torn(
    messages: list[Message], cuts: list[int], between: bool
) -> None:
    noise = b"PING\r\n+OK\r\n" if between else b""
    stream = b"".join(delivered(message, number) + noise for number, message in enumerate(messages))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(edges)]
    said = heard(Wire(), *pieces)
    deliveries = [each for each in said if isinstance(each, Delivery)]
    assert [each.message() for each in deliveries] == messages
    assert [each.sid for each in deliveries] == list(range(len(messages)))
    assert len(said) - len(deliveries) == between * len(messages)


def test_a_servers_other_words_are_understood() -> None:
    stream = (
        b'INFO {"server_id":"x","max_payload":4096,"headers":true,"tls_required":false}\r\n'
        b"PING\r\nPONG\r\n+OK\r\n-ERR 'Permissions Violation for Publish to \"x\"'\r\n"
    )
    info = Info(max_payload=4096, headers=True)
    assert heard(Wire(), stream) == [info, Ping(), Pong(), Refusal('Permissions Violation for Publish to "x"')]


def test_nobody_listens_is_a_status() -> None:
    [said] = heard(Wire(), b"HMSG _INBOX.1 7 16 16\r\nNATS/1.0 503\r\n\r\n\r\n")
    assert isinstance(said, Delivery)
    assert said.message() == Message("_INBOX.1", b"", "", {"Status": "503"})
    [said] = heard(Wire(), b"HMSG a 7 25 27\r\nNATS/1.0 404 Not Here\r\n\r\nab\r\n")
    assert isinstance(said, Delivery)
    assert said.message() == Message("a", b"ab", "", {"Status": "404", "Description": "Not Here"})


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b"MSG\r\n",
        b"MSG a 1\r\n",
        b"MSG a one 3\r\n",
        b"MSG a 1 -3\r\n",
        b"MSG a 1 b c 3\r\n",
        b"MSG a 1 99999999999\r\n",
        b"HMSG a 1 5\r\n",
        b"HMSG a 1 5 4\r\n",
        b"INFO {\r\n",
        b"x" * (nats_wire.LINE_LIMIT_BYTES + 1),
    ],
)
def test_what_is_not_nats_ends_the_connection(nonsense: bytes) -> None:
    with pytest.raises(ProtocolError):
        Wire().feed(nonsense)


@pytest.mark.parametrize(
    "delivery",
    [
        Delivery(1, b"a\xff", b"", b"", b""),
        Delivery(1, b"a", b"\xff", b"", b""),
        Delivery(1, b"a", b"", b"x", b""),
        Delivery(1, b"a", b"", b"NATS/1.0", b""),
        Delivery(1, b"a", b"", b"NATS/1.0\r\n", b""),
        Delivery(1, b"a", b"", b"NATS/1.0\r\nno colon\r\n\r\n", b""),
        Delivery(1, b"a", b"", b"NATS/1.0\r\na: \xff\r\n\r\n", b""),
        Delivery(1, b"a", b"", b"HTTP/1.0\r\na: b\r\n\r\n", b""),
    ],
)
def test_a_message_that_cannot_be_read_is_one_messages_error(delivery: Delivery) -> None:
    with pytest.raises(ProtocolError, match="dropped a message on b'a"):
        delivery.message()


@pytest.mark.parametrize("header", [{"": "x"}, {"a b": "x"}, {"a:": "x"}, {"é": "x"}, {"a": "x\r\nPUB b 0"}])
def test_what_cannot_be_a_header_is_refused(header: dict[str, str]) -> None:
    with pytest.raises(ProtocolError):
        nats_wire.publish("a", "", b"", header)


def test_who_connects_says_who_it_is() -> None:
    def said(user: str, password: str) -> bytes:
        return nats_wire.connect(name="n", version="1", user=user, password=password)

    assert b'"user":"u","pass":"p"' in said("u", "p")
    assert b'"auth_token":"t"' in said("t", "")
    assert b"user" not in said("", "")
    assert b'"no_responders":true' in said("", "")


def test_subscriptions_may_be_of_a_queue() -> None:
    assert nats_wire.subscribe("a.*", "", 3) == b"SUB a.* 3\r\n"
    assert nats_wire.subscribe("a.*", "q", 3) == b"SUB a.* q 3\r\n"
    assert nats_wire.unsubscribe(3) == b"UNSUB 3\r\n"
