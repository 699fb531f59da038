"""The contract of both buses: the in-process fake and NATS. test_nats_bus.py tests the faults that only NATS has."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from shared.bus.contract import LAST_HEADER, Bus, Message, Receive
from shared.bus.memory_bus import MemoryBroker, MemoryBus, matches
from shared.bus.nats_bus import connect
from shared.config import NatsConfig
from shared.errors import BusDown, NoResponders, Overloaded, PayloadTooLarge, ProtocolError, RequestTimeout

LIMIT_BYTES = 64 << 10
DEADLINE_S = 60.0

Open = Callable[[], Awaitable[Bus]]


@pytest.fixture(params=["memory", "nats"])
async def open_bus(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    """Makes endpoints of one bus, drained afterwards."""
    opened: list[Bus] = []
    broker = MemoryBroker()
    url = request.getfixturevalue("nats_url") if request.param == "nats" else ""

    async def open_one() -> Bus:
        bus: Bus
        if url:
            bus = await connect(NatsConfig(url=url, payload_limit_bytes=LIMIT_BYTES), "test")
        else:
            bus = MemoryBus(broker, payload_limit_bytes=LIMIT_BYTES)
        opened.append(bus)
        return bus

    yield open_one
    for bus in opened:
        await bus.drain()


class Inbox:
    """Collects messages and waits for them."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._grew = asyncio.Condition()

    async def receive(self, message: Message) -> None:
        async with self._grew:
            self.messages.append(message)
            self._grew.notify_all()

    async def wait(self, count: int) -> list[Message]:
        async with asyncio.timeout(DEADLINE_S), self._grew:
            await self._grew.wait_for(lambda: len(self.messages) >= count)
        return self.messages


def subject() -> str:
    return f"test.{secrets.token_hex(6)}"


async def echo(bus: Bus, where: str, queue: str = "", answer: bytes | None = None) -> None:
    async def receive(message: Message) -> None:
        await bus.publish(message.reply, message.payload if answer is None else answer, headers=message.headers)

    await bus.subscribe(where, receive, queue=queue)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.b.c", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*.c", "a.b.c", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
    ],
)
async def test_wildcards_match_whole_tokens(open_bus: Open, pattern: str, name: str, expected: bool) -> None:
    bus, root, inbox = await open_bus(), subject(), Inbox()
    await bus.subscribe(f"{root}.{pattern}", inbox.receive)
    end = Inbox()
    await bus.subscribe(f"{root}-end", end.receive)
    await bus.publish(f"{root}.{name}", b"")
    await bus.publish(f"{root}-end", b"")
    await end.wait(1)
    if expected:
        await inbox.wait(1)
    assert len(inbox.messages) == int(expected)
    assert matches(pattern, name) is expected


async def test_messages_arrive_in_order_with_their_headers(open_bus: Open) -> None:
    sender, receiver, where, inbox = await open_bus(), await open_bus(), subject(), Inbox()
    await receiver.subscribe(where, inbox.receive)
    for number in range(500):
        await sender.publish(where, str(number).encode(), headers={"Number": str(number)})
    messages = await inbox.wait(500)
    assert [message.payload for message in messages] == [str(number).encode() for number in range(500)]
    assert messages[7].headers == {"Number": "7"}
    assert messages[7].reply == ""


async def test_every_subscriber_hears_a_message_and_one_of_each_queue(open_bus: Open) -> None:
    sender, where = await open_bus(), subject()
    alone, group, other = Inbox(), Inbox(), Inbox()
    first: list[bytes] = []
    second: list[bytes] = []

    def member(mine: list[bytes]) -> Receive:
        async def receive(message: Message) -> None:
            mine.append(message.payload)
            await group.receive(message)

        return receive

    bus = await open_bus()
    await bus.subscribe(where, alone.receive)
    await bus.subscribe(where, member(first), queue="one")
    await (await open_bus()).subscribe(where, member(second), queue="one")
    await bus.subscribe(where, other.receive, queue="two")
    for number in range(100):
        await sender.publish(where, str(number).encode())
    await alone.wait(100)
    await other.wait(100)
    messages = await group.wait(100)
    assert first
    assert second
    assert sorted(first + second) == sorted(message.payload for message in messages)
    assert len({message.payload for message in messages}) == len(messages) == 100


async def test_a_request_gets_its_answer(open_bus: Open) -> None:
    client, service, where = await open_bus(), await open_bus(), subject()
    await echo(service, where)
    answer = await client.request(where, b"question", timeout_s=DEADLINE_S, headers={"Content-Type": "text/plain"})
    assert answer.payload == b"question"
    assert answer.headers["Content-Type"] == "text/plain"


async def test_many_requests_at_once_get_their_own_answers(open_bus: Open) -> None:
    client, service, where = await open_bus(), await open_bus(), subject()
    await echo(service, where)
    payloads = [str(number).encode() for number in range(200)]
    answers = await asyncio.gather(*(client.request(where, each, timeout_s=DEADLINE_S) for each in payloads))
    assert [answer.payload for answer in answers] == payloads


async def test_a_request_without_a_subscriber_fails_at_once(open_bus: Open) -> None:
    bus = await open_bus()
    with pytest.raises(NoResponders):
        await bus.request(subject(), b"", timeout_s=60.0)


async def test_a_request_that_is_not_answered_times_out(open_bus: Open) -> None:
    bus, where = await open_bus(), subject()
    await bus.subscribe(where, Inbox().receive)
    with pytest.raises(RequestTimeout):
        await bus.request(where, b"", timeout_s=0.05)


async def test_a_payload_over_the_limit_is_refused_before_it_is_sent(open_bus: Open) -> None:
    bus, where, inbox = await open_bus(), subject(), Inbox()
    await bus.subscribe(where, inbox.receive)
    with pytest.raises(PayloadTooLarge) as wrong:
        await bus.publish(where, bytes(LIMIT_BYTES + 1))
    assert (wrong.value.size_bytes, wrong.value.limit_bytes) == (LIMIT_BYTES + 1, LIMIT_BYTES)
    with pytest.raises(PayloadTooLarge):
        await bus.request(where, bytes(LIMIT_BYTES + 1), timeout_s=1.0)
    await bus.publish(where, bytes(LIMIT_BYTES))
    assert len((await inbox.wait(1))[0].payload) == LIMIT_BYTES


@pytest.mark.parametrize("subject", ["", "two words", "a..b", ".a", "a.", "line\nbreak", "a.*", "a.>"])
async def test_what_is_not_a_subject_is_refused(open_bus: Open, subject: str) -> None:
    bus = await open_bus()
    with pytest.raises(ProtocolError):
        await bus.publish(subject, b"")
    with pytest.raises(ProtocolError):
        await bus.request(subject, b"", timeout_s=1.0)


@pytest.mark.parametrize("pattern", ["", "two words", "a..b", "a.>.b", "a.b*"])
async def test_what_is_not_a_pattern_is_refused(open_bus: Open, pattern: str) -> None:
    bus = await open_bus()
    with pytest.raises(ProtocolError):
        await bus.subscribe(pattern, Inbox().receive)


async def test_a_slow_receiver_loses_messages_over_its_limit_and_is_notified(open_bus: Open) -> None:
    bus, where = await open_bus(), subject()
    told: list[int] = []
    seen: list[bytes] = []
    busy, release, enough = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(message: Message) -> None:
        busy.set()
        await release.wait()
        seen.append(message.payload)
        if len(seen) == 11:
            enough.set()

    def dropped(count: int) -> None:
        told.append(count)
        if count == 20:
            release.set()

    subscription = await bus.subscribe(where, slow, pending_limit=10, dropped=dropped)
    await bus.publish(where, b"first")
    await asyncio.wait_for(busy.wait(), DEADLINE_S)
    for number in range(30):
        await bus.publish(where, str(number).encode())
    await asyncio.wait_for(enough.wait(), DEADLINE_S)
    assert told == list(range(1, 21))
    assert seen == [b"first", *(str(number).encode() for number in range(10))]
    statistics = subscription.statistics()
    assert (statistics.received, statistics.dropped, statistics.pending) == (31, 20, 0)


async def test_an_exception_out_of_receive_is_logged_and_counted(
    open_bus: Open, caplog: pytest.LogCaptureFixture
) -> None:
    bus, where, inbox = await open_bus(), subject(), Inbox()

    async def receive(message: Message) -> None:
        if message.payload == b"bad":
            raise ValueError("a bad message")
        await inbox.receive(message)

    subscription = await bus.subscribe(where, receive)
    await bus.publish(where, b"bad")
    await bus.publish(where, b"good")
    await inbox.wait(1)
    assert subscription.statistics().failed == 1
    assert where in caplog.text
    assert "a bad message" in caplog.text


async def test_what_cannot_be_read_is_counted_beyond_its_subscriptions_end(
    open_bus: Open, caplog: pytest.LogCaptureFixture
) -> None:
    bus, other, inbox = await open_bus(), await open_bus(), Inbox()

    async def receive(message: Message) -> None:
        if message.payload == b"bad":
            raise ProtocolError("a bad message")
        await inbox.receive(message)

    for number in (1, 2):
        where = subject()
        subscription = await bus.subscribe(where, receive)
        for payload in (b"bad", b"bad", b"good"):
            await other.publish(where, payload)
        await inbox.wait(number)
        assert (subscription.statistics().malformed, subscription.statistics().failed) == (2, 0)
        assert caplog.text.count(f"unreadable message on {where}") == 1
        await subscription.unsubscribe()
        assert bus.malformed == 2 * number
    assert other.malformed == 0
    assert "Traceback" not in caplog.text


async def test_unsubscribing_hands_over_what_has_come(open_bus: Open) -> None:
    sender, bus, where = await open_bus(), await open_bus(), subject()
    inbox, first, release = Inbox(), asyncio.Event(), asyncio.Event()

    async def slow(message: Message) -> None:
        first.set()
        await release.wait()
        await inbox.receive(message)

    subscription = await bus.subscribe(where, slow)
    end = Inbox()
    await bus.subscribe(f"{where}.end", end.receive)
    for _ in range(5):
        await sender.publish(where, b"")
    await sender.publish(f"{where}.end", b"")
    await asyncio.wait_for(first.wait(), DEADLINE_S)
    await end.wait(1)
    ending = asyncio.create_task(subscription.unsubscribe())
    release.set()
    await ending
    assert len(inbox.messages) == 5
    await subscription.unsubscribe()
    with pytest.raises(NoResponders):
        await sender.request(where, b"", timeout_s=DEADLINE_S)


async def test_no_message_of_a_queue_is_lost_when_a_member_leaves(open_bus: Open) -> None:
    sender, where, group = await open_bus(), subject(), Inbox()
    await (await open_bus()).subscribe(where, group.receive, queue="one")
    leaver = await open_bus()
    for turn in range(20):
        leaving = await leaver.subscribe(where, group.receive, queue="one")
        for _ in range(50):
            await sender.publish(where, b"")
        await leaving.unsubscribe()
        await group.wait(50 * (turn + 1))


async def test_a_subscription_is_known_when_subscribe_returns(open_bus: Open) -> None:
    sender, service = await open_bus(), await open_bus()
    for _ in range(50):
        where = subject()
        await echo(service, where)
        await sender.request(where, b"", timeout_s=DEADLINE_S)


async def test_a_receiver_may_end_its_own_subscription(open_bus: Open) -> None:
    bus, where, done = await open_bus(), subject(), asyncio.Event()

    async def once(message: Message) -> None:
        await subscription.unsubscribe()
        done.set()

    subscription = await bus.subscribe(where, once)
    await bus.publish(where, b"")
    await asyncio.wait_for(done.wait(), DEADLINE_S)


async def test_a_stream_ends_with_the_marked_message(open_bus: Open) -> None:
    client, service, where = await open_bus(), await open_bus(), subject()

    async def count(message: Message) -> None:
        for number in range(3):
            await service.publish(message.reply, str(number).encode())
        await service.publish(message.reply, b"end", headers={LAST_HEADER: "true"})
        await service.publish(message.reply, b"beyond")

    await service.subscribe(where, count)
    async with client.stream(where, b"", idle_timeout_s=DEADLINE_S) as answers:
        assert [answer.payload async for answer in answers] == [b"0", b"1", b"2", b"end"]


async def test_a_stream_without_a_subscriber_fails_at_once(open_bus: Open) -> None:
    bus = await open_bus()
    async with bus.stream(subject(), b"", idle_timeout_s=60.0) as answers:
        with pytest.raises(NoResponders):
            await anext(answers)


async def test_a_stream_that_falls_silent_times_out(open_bus: Open) -> None:
    client, service, where = await open_bus(), await open_bus(), subject()
    await echo(service, where)
    async with client.stream(where, b"one", idle_timeout_s=1.5) as answers:
        assert (await anext(answers)).payload == b"one"
        with pytest.raises(RequestTimeout):
            await anext(answers)


async def test_a_stream_that_is_not_read_ends_at_its_limit(open_bus: Open) -> None:
    client, service, where, sent = await open_bus(), await open_bus(), subject(), asyncio.Event()
    end = Inbox()
    await client.subscribe(f"{where}.end", end.receive)

    async def flood(message: Message) -> None:
        for _ in range(9):
            await service.publish(message.reply, b"")
        await service.publish(f"{where}.end", b"")
        sent.set()

    await service.subscribe(where, flood)
    async with client.stream(where, b"", idle_timeout_s=DEADLINE_S, pending_limit=8) as answers:
        await asyncio.wait_for(sent.wait(), DEADLINE_S)
        await end.wait(1)
        with pytest.raises(Overloaded):
            await anext(answers)


async def test_gone_is_called_when_the_inbox_is_gone_and_not_while_it_is_there(open_bus: Open) -> None:
    client, service, where = await open_bus(), await open_bus(), subject()
    inboxes: asyncio.Queue[str] = asyncio.Queue()
    calls: list[str] = []
    gone = asyncio.Event()

    async def receive(message: Message) -> None:
        inboxes.put_nowait(message.reply)

    def tell_gone() -> None:
        calls.append("late")
        gone.set()

    await service.subscribe(where, receive)
    async with client.stream(where, b"", idle_timeout_s=DEADLINE_S) as answers:
        inbox = await asyncio.wait_for(inboxes.get(), DEADLINE_S)
        await service.publish(inbox, b"1", no_responders=lambda: calls.append("early"))
        assert (await anext(answers)).payload == b"1"
        await service.publish(inbox, b"2")
        assert (await anext(answers)).payload == b"2"
    with pytest.raises(NoResponders):  # a round trip behind the end of the stream
        await client.request(subject(), b"", timeout_s=DEADLINE_S)
    await service.publish(inbox, b"3", no_responders=tell_gone)
    await asyncio.wait_for(gone.wait(), DEADLINE_S)
    assert calls == ["late"]


async def test_a_drained_bus_has_handed_over_everything_and_refuses_more(open_bus: Open) -> None:
    bus, where, inbox = await open_bus(), subject(), Inbox()
    await bus.subscribe(where, inbox.receive)
    for _ in range(100):
        await bus.publish(where, b"")
    await bus.drain()
    assert len(inbox.messages) == 100
    assert not bus.connected
    with pytest.raises(BusDown):
        await bus.publish(where, b"")
    await bus.drain()


async def test_a_receiver_may_answer_while_its_bus_drains(open_bus: Open) -> None:
    client, service, where = await open_bus(), await open_bus(), subject()
    asked = asyncio.Event()
    draining = asyncio.Event()

    async def late(message: Message) -> None:
        asked.set()
        await draining.wait()
        await service.publish(message.reply, b"late")

    await service.subscribe(where, late)
    answer = asyncio.create_task(client.request(where, b"", timeout_s=DEADLINE_S))
    await asyncio.wait_for(asked.wait(), DEADLINE_S)
    drain = asyncio.create_task(service.drain())
    draining.set()
    assert (await answer).payload == b"late"
    await drain
