"""What a read uses is closed in threads: a process that was killed may take its time to end, and the kvbm goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from services.kvbm.peers.connections import PeerConnections
from services.kvbm.peers.messages import PeerHello
from tests.kvbm.peer_rig import PEERS
from tests.kvbm.store_rig import LIMIT_S


class SlowEnd:
    """A part of a read that ends only while the event loop turns."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self.may_end = threading.Event()
        self.ended = self.was_cut = False
        self._loop = asyncio.get_running_loop()

    def cut(self) -> None:
        self.was_cut = True

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self.closing.set)
        self.ended = self.may_end.wait(LIMIT_S)


class FailingEnd(SlowEnd):
    """A part of a read that cannot be closed."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.may_end.set()
        self._why = why

    def close(self) -> None:
        super().close()
        raise OSError(self._why)


def no_hello() -> PeerHello:
    raise AssertionError("nothing connects")


@pytest.fixture
async def connections() -> AsyncIterator[PeerConnections]:
    made = PeerConnections(PEERS, None, no_hello)
    yield made
    made.close()


async def read_with(connections: PeerConnections, parts: list[SlowEnd]) -> None:
    async with connections.limited(LIMIT_S) as used:
        for part in parts:
            used.add(part, set())


async def test_a_read_ends_when_all_that_it_used_has_ended_and_the_loop_turns_meanwhile(
    connections: PeerConnections,
) -> None:
    parts = [SlowEnd(), SlowEnd()]
    read = asyncio.create_task(read_with(connections, parts))
    async with asyncio.timeout(LIMIT_S):
        for part in parts:
            await part.closing.wait()
    parts[0].may_end.set()
    await asyncio.sleep(0)
    assert not read.done()
    parts[1].may_end.set()
    await read
    assert all(part.ended for part in parts)


async def test_a_read_that_is_cancelled_while_its_parts_end_waits_for_them(connections: PeerConnections) -> None:
    part = SlowEnd()
    read = asyncio.create_task(read_with(connections, [part]))
    async with asyncio.timeout(LIMIT_S):
        await part.closing.wait()
    for _ in range(2):
        read.cancel()
        await asyncio.sleep(0)
    assert not read.done()
    part.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert part.ended


async def test_what_a_cancelled_read_has_started_is_ended_without_the_loop(connections: PeerConnections) -> None:
    part, starts = SlowEnd(), threading.Event()

    def start() -> SlowEnd:
        starts.wait(LIMIT_S)
        return part

    read = asyncio.create_task(connections.in_thread(start))
    await asyncio.sleep(0)
    read.cancel()
    await asyncio.sleep(0)
    starts.set()
    async with asyncio.timeout(LIMIT_S):
        await part.closing.wait()
    part.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert part.ended


async def test_without_a_thread_all_is_closed_too(connections: PeerConnections) -> None:
    part = SlowEnd()
    part.may_end.set()
    connections.close()
    await connections.closed([part])
    assert part.ended


@pytest.mark.parametrize("threads", [True, False])
async def test_what_cannot_be_closed_keeps_nothing_else_open_and_every_reason_is_known(
    connections: PeerConnections, threads: bool
) -> None:
    if not threads:
        connections.close()
    last = SlowEnd()
    last.may_end.set()
    parts = [FailingEnd("the first"), FailingEnd("the second"), last]
    with pytest.raises(ExceptionGroup) as raised:
        await connections.closed(parts)
    assert all(part.ended for part in parts)
    assert [str(wrong) for wrong in raised.value.exceptions] == ["the first", "the second"]


async def test_what_cannot_be_closed_is_known_also_to_a_read_that_is_cancelled(connections: PeerConnections) -> None:
    slow = SlowEnd()
    read = asyncio.create_task(read_with(connections, [FailingEnd("it stays"), slow]))
    async with asyncio.timeout(LIMIT_S):
        await slow.closing.wait()
    read.cancel()
    await asyncio.sleep(0)
    slow.may_end.set()
    with pytest.raises(ExceptionGroup) as raised:
        await read
    assert [str(wrong) for wrong in raised.value.exceptions] == ["it stays"]
    assert slow.ended
