"""The limits of a subscription's queue, and the ways in which it ends."""

from __future__ import annotations

import asyncio
import logging

import pytest

from shared.bus import receive_queue
from shared.bus.contract import Message
from shared.bus.receive_queue import ReceiveQueue
from shared.errors import PayloadTooLarge, ProtocolError
from shared.rate_limited_log import RateLimitedLog


async def test_waiting_messages_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_queue, "PENDING_LIMIT_BYTES", 100)
    release, seen, told = asyncio.Event(), list[int](), list[int]()

    async def receive(message: Message) -> None:
        await release.wait()
        seen.append(len(message.payload))

    receiving = ReceiveQueue("subject", receive, pending_limit=1000, dropped=told.append)
    for size in (60, 60, 30, 10, 1):
        receiving.offer(Message("subject", bytes(size)))
        receiving.validate()
    assert told == [1, 2]
    release.set()
    await receiving.drain()
    receiving.validate()
    assert seen == [60, 30, 10]
    assert receiving.statistics().pending == 0


async def test_headers_count_towards_the_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_queue, "PENDING_LIMIT_BYTES", 100)
    release, told = asyncio.Event(), list[int]()

    async def receive(message: Message) -> None:
        await release.wait()

    receiving = ReceiveQueue("subject", receive, pending_limit=1000, dropped=told.append)
    for _ in range(3):
        receiving.offer(Message("subject", b"", headers={"name": "x" * 40}))
        receiving.validate()
    assert told == [1]
    release.set()
    await receiving.drain()
    receiving.validate()


async def test_a_cancelled_drain_ends_the_receiver_where_it_stands() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def receive(message: Message) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    receiving = ReceiveQueue("subject", receive, pending_limit=10)
    receiving.offer(Message("subject", b""))
    receiving.offer(Message("subject", b""))
    await started.wait()
    draining = asyncio.create_task(receiving.drain())
    await asyncio.sleep(0)
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    await asyncio.wait_for(ended.wait(), 60.0)
    receiving.offer(Message("subject", b""))
    assert receiving.statistics().received == 2


async def test_a_receiver_that_never_waits_lets_others_run() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def receive(message: Message) -> None:
        pass

    counting = asyncio.create_task(count_turns())
    receiving = ReceiveQueue("subject", receive, pending_limit=10_000)
    for _ in range(10_000):
        receiving.offer(Message("subject", b""))
    await receiving.drain()
    counting.cancel()
    assert turns > 100


async def test_a_flood_of_unreadable_messages_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def receive(message: Message) -> None:
        raise ProtocolError("not msgpack")

    unreadable = RateLimitedLog()
    receiving = [ReceiveQueue(f"subject.{each}.>", receive, pending_limit=1000, unreadable=unreadable) for each in "ab"]
    for one in receiving:
        for _ in range(200):
            one.offer(Message("subject.x", b"garbage"))
        await one.drain()
        assert (one.statistics().malformed, one.statistics().failed) == (200, 0)
    assert unreadable.count == 400
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert [record.exc_info for record in caplog.records] == [None] * 2
    for told, subject in zip(caplog.messages, ("subject.a.>", "subject.b.>"), strict=True):
        head = f"unreadable message on {subject}: subject.x: not msgpack"
        assert told == f"{head} (seen 1 times; logged every 60 s at most)"


async def test_after_the_interval_unreadable_messages_are_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    async def receive(message: Message) -> None:
        raise ProtocolError("not msgpack")

    receiving = ReceiveQueue("subject", receive, pending_limit=10, unreadable=RateLimitedLog(interval_s=0.0))
    for _ in range(3):
        receiving.offer(Message("subject", b"garbage"))
    await receiving.drain()
    assert ["seen 3 times" in told for told in caplog.messages] == [False, False, True]


async def test_an_answer_over_the_limit_is_a_failure_with_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def receive(message: Message) -> None:
        raise PayloadTooLarge(2, 1)

    receiving = ReceiveQueue("subject", receive, pending_limit=10)
    receiving.offer(Message("subject", b""))
    await receiving.drain()
    assert (receiving.statistics().malformed, receiving.statistics().failed) == (0, 1)
    assert caplog.records[0].levelno == logging.ERROR
    assert caplog.records[0].exc_info is not None
