from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus.zmtp import FRAME_LIMIT_BYTES, GREETING, READY, Subscriber, command, message
from shared.errors import ProtocolError

SUB = command(b"READY", b"\x0bSocket-Type\0\0\0\x03SUB\x08Identity\0\0\0\0")


def joined(topic: bytes = b"kv") -> Subscriber:
    subscriber = Subscriber(topic)
    assert subscriber.receive(GREETING + SUB) == [READY]
    assert subscriber.ready
    return subscriber


@given(st.lists(st.integers(0, len(GREETING + SUB) + 20), max_size=8))
def test_a_handshake_and_a_subscription_are_read_however_they_are_cut(cuts: list[int]) -> None:
    told = GREETING + SUB + message([b"\1k"]) + command(b"PING", b"\0\1context")
    subscriber = Subscriber(b"kv")
    answers: list[bytes] = []
    for begin, end in pairwise([0, *sorted(min(cut, len(told)) for cut in cuts), len(told)]):
        answers += subscriber.receive(told[begin:end])
        subscriber.validate()
    assert answers == [READY, command(b"PONG", b"context")]
    assert subscriber.subscribed


@given(st.binary(max_size=200), st.sampled_from([b"", GREETING, GREETING + SUB]))
def test_whatever_comes_is_refused_or_bounded(noise: bytes, before: bytes) -> None:
    subscriber = Subscriber(b"kv")
    subscriber.receive(before)
    try:
        for at in range(len(noise)):
            subscriber.receive(noise[at : at + 1])
            subscriber.validate()
    except ProtocolError:
        pass


def test_a_subscriber_has_what_it_subscribed_to_until_it_cancels() -> None:
    subscriber = joined()
    assert not subscriber.subscribed
    for wanted, gone in (
        (message([b"\1"]), message([b"\0"])),
        (command(b"SUBSCRIBE", b"kv"), command(b"CANCEL", b"kv")),
    ):
        subscriber.receive(wanted)
        assert subscriber.subscribed
        subscriber.receive(gone)
        assert not subscriber.subscribed


def test_only_the_topics_own_prefixes_are_kept() -> None:
    subscriber = joined()
    for other in (b"kvx", b"x", b"KV", *(number.to_bytes(4, "big") + bytes(900) for number in range(1, 1000))):
        subscriber.receive(message([b"\1" + other]))
    assert not subscriber.subscribed
    for _ in range(1000):
        for prefix in (b"", b"k", b"kv"):
            subscriber.receive(message([b"\1" + prefix]))
            subscriber.validate()
    assert subscriber.subscribed


def test_the_later_frames_of_a_message_do_not_subscribe() -> None:
    subscriber = joined()
    subscriber.receive(message([b"hello", b"\1kv"]))
    assert not subscriber.subscribed


@pytest.mark.parametrize("size_bytes", [FRAME_LIMIT_BYTES + 1, 1 << 30, (1 << 64) - 1])
def test_a_frame_over_the_limit_is_refused_before_its_body_comes(size_bytes: int) -> None:
    with pytest.raises(ProtocolError, match="the limit is"):
        joined().receive(b"\x02" + size_bytes.to_bytes(8, "big"))


@pytest.mark.parametrize(
    "told",
    [
        b"GET / HTTP/1.1\r\n".ljust(64),
        GREETING[:10] + b"\1" + GREETING[11:],
        GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:],
        GREETING + SUB.replace(b"\x03SUB", b"\x03REQ"),
        GREETING + message([b"\1kv"]),
        GREETING + command(b"SUBSCRIBE", b"kv"),
        GREETING + command(b"READY", b"\x0bSocket-Type\xff\xff\xff\xffSUB"),
        GREETING + command(b"READY", b"\x0b"),
        GREETING + b"\x04\x00",
    ],
)
def test_a_handshake_that_is_no_subscribers_is_refused(told: bytes) -> None:
    with pytest.raises(ProtocolError):
        Subscriber(b"kv").receive(told)
