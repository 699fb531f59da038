"""The road over TCP: reads blocks of a peer through several connections at once, straight into this pool's slots.

    read ──▶ Borrow on one connection ──▶ place: which slots ──▶ Takes, which the connections share out ──▶ Return
                                                                  │ a thread each: header, bytes, checksum
    a deadline, a fault, `gone`, a cancellation ──▶ the connections are cut ──▶ their threads end ──▶ read returns

A connection that has ended a read in order is kept for the next one. All deadlines are timers of the event loop, which
cut connections; no thread outlives the read that it works for.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

from msgspec import Struct, field

from services.kvbm.config import PeersConfig
from services.kvbm.peers.contract import PlaceBlocks, ReadBlocks
from services.kvbm.peers.messages import (
    FRAME_BYTES_MOST,
    PEER_QUESTION,
    Borrow,
    Count,
    Lent,
    PeerAddress,
    PeerAnswer,
    PeerFault,
    PeerHello,
    PeerQuestion,
    PeerRefused,
    Received,
    Return,
    Take,
    check_counted,
    check_hello,
    check_layout,
    check_lent,
    decode_answer,
    plan_takes,
)
from services.kvbm.peers.stream import PeerStream
from services.kvbm.peers.tls import PeerTls
from shared.hashing import ContentKey
from shared.kvbm_messages import StoreLayout
from shared.pool.map import ArenaMap

IDLE_S = 60.0
"""Seconds that an unused connection is kept."""
CONNECT_S = 5.0
"""Seconds for a connection, with TLS and the peer's hello."""

T = TypeVar("T")


class _Peer(Struct):
    address: PeerAddress
    epoch: int | None = None
    hello: PeerHello | None = None
    idle: list[tuple[PeerStream, asyncio.TimerHandle]] = field(default_factory=list)
    busy: set[PeerStream] = field(default_factory=set)


class _Reading(Struct, eq=False):
    """What the threads of one read share."""

    slots: ArenaMap
    block_bytes: int
    epoch: int
    loan: int
    places: Sequence[int | None]
    takes: deque[list[int]]
    written: dict[int, int] = field(default_factory=dict)
    fault: PeerFault | None = None


class SocketRoad:
    """The road of one kvbm, as it reads. `hello` says what it is to others."""

    def __init__(self, config: PeersConfig, tls: PeerTls | None, hello: Callable[[], PeerHello]) -> None:
        self._config = config
        self._tls = tls
        self._hello = hello
        self._loop = asyncio.get_running_loop()
        self._slots: dict[str, ArenaMap] = {}
        self._peers: dict[str, _Peer] = {}
        self._threads = ThreadPoolExecutor(config.reads * config.streams + config.reads, "peer-read")

    # --- the contract

    def register(self, layout: StoreLayout, slots: ArenaMap) -> None:
        """Let blocks of the layout be read into these slots."""
        self._slots[layout.digest] = slots

    def unregister(self, digest: str) -> None:
        """Forget a layout that no read is for."""
        self._slots.pop(digest, None)

    def describe(self) -> PeerHello:
        """Return what each connection of this kvbm's port begins with."""
        return self._hello()

    async def leading(self, peer: PeerAddress, layout: StoreLayout, keys: Sequence[ContentKey], limit_s: float) -> int:
        """Return how many leading blocks the peer has in memory. Raise PeerFault."""
        with self._limited(limit_s) as streams:
            stream = await self._connected(peer, layout, streams)
            number = stream.next_number()
            answer = await self._in_thread(_ask, stream, Count(number, layout.digest, b"".join(keys)))
            counted = check_counted(answer, number, len(keys))
            self._keep(peer, stream, streams)
            return counted

    async def read(
        self, peer: PeerAddress, layout: StoreLayout, keys: Sequence[ContentKey], place: PlaceBlocks, limit_s: float
    ) -> ReadBlocks:
        """Read the leading blocks of these keys that the peer has into the slots that `place` returns. Raise PeerFault
        where nothing was read."""
        began_s = self._loop.time()
        with self._limited(limit_s) as streams:
            first = await self._connected(peer, layout, streams)
            epoch = self._peers[peer.instance].epoch
            assert epoch is not None, "it is known since the first connection"
            number = first.next_number()
            answer = await self._in_thread(_ask, first, Borrow(number, epoch, layout, b"".join(keys)))
            lent = check_lent(answer, number, keys)
            if not lent.blocks:
                self._keep(peer, first, streams)
                return ReadBlocks({}, 0, self._loop.time() - began_s, None)
            places = place(lent.blocks)
            assert len(places) == len(lent.blocks), "a place, or none, for each block"
            wanted = [index for index, slot in enumerate(places) if slot is not None]
            block_bytes = layout.kv.block_bytes
            takes = plan_takes(wanted, block_bytes, self._config.streams, self._config.take_bytes)
            reading = _Reading(self._slots[layout.digest], block_bytes, epoch, lent.loan, places, deque(takes))
            began_s = self._loop.time()
            await self._read_all(peer, layout, first, streams, reading, lent)
            return ReadBlocks(reading.written, len(lent.blocks), self._loop.time() - began_s, reading.fault)

    def gone(self, instance: str) -> None:
        """Close the connections to a peer that has left; its reads end."""
        peer = self._peers.pop(instance, None)
        if peer is not None:
            for stream, timer in peer.idle:
                timer.cancel()
                stream.close()
            for stream in peer.busy:
                stream.cut()

    def close(self) -> None:
        """End the connections and threads, after all reads."""
        for instance in list(self._peers):
            self.gone(instance)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- one read

    async def _read_all(
        self,
        peer: PeerAddress,
        layout: StoreLayout,
        first: PeerStream,
        streams: _Limited,
        reading: _Reading,
        lent: Lent,
    ) -> None:
        """Take all blocks over several connections, and return the loan. Nothing writes to a slot afterwards."""
        more = min(self._config.streams, len(reading.takes)) - 1
        pulls = [asyncio.ensure_future(self._pull(peer, layout, first, streams, reading))]
        pulls += [asyncio.ensure_future(self._pull(peer, layout, None, streams, reading)) for _ in range(more)]
        try:
            await asyncio.wait(pulls)
        finally:
            await streams.ended(pulls)
        if reading.fault is None or first in streams.whole:
            with suppress(PeerFault):
                number = first.next_number()
                check_counted(await self._in_thread(_ask, first, Return(number, lent.loan)), number, 0)
                self._keep(peer, first, streams)
        if streams.late and reading.fault is not None:
            reading.fault = PeerFault("late", f"not all blocks came in time: {reading.fault}")

    async def _pull(
        self,
        peer: PeerAddress,
        layout: StoreLayout,
        first: PeerStream | None,
        streams: _Limited,
        reading: _Reading,
    ) -> None:
        """Take blocks over one connection as long as there are any."""
        try:
            stream = first or await self._connected(peer, layout, streams)
            await self._in_thread(_take_all, stream, reading)
        except PeerFault as wrong:
            reading.fault = reading.fault or wrong
            return
        streams.whole.add(stream)
        if first is None:
            self._keep(peer, stream, streams)

    # --- connections

    async def _connected(self, address: PeerAddress, layout: StoreLayout, streams: _Limited) -> PeerStream:
        """Return a connection to the peer, which is what it was and has the layout. Raise PeerFault."""
        peer = self._peers.get(address.instance)
        if peer is None or peer.address != address:
            self.gone(address.instance)
            peer = self._peers[address.instance] = _Peer(address)
        while peer.idle:
            stream, timer = peer.idle.pop()
            timer.cancel()
            if stream.ended:
                stream.close()
                continue
            streams.add(stream, peer.busy)
            assert peer.hello is not None, "it was connected"
            if not any(theirs.digest == layout.digest for theirs in peer.hello.layouts):
                continue  # a new connection tells which layouts it has by now
            check_layout(peer.hello, layout)
            return stream
        limit_s = min(CONNECT_S, streams.deadline_s - self._loop.time())
        stream = await self._in_thread(_connect, address, limit_s)
        streams.add(stream, peer.busy)
        first_frame = await self._in_thread(_begin, stream, self._tls)
        hello = check_hello(first_frame, address.instance, None)
        if peer.epoch is not None and hello.epoch != peer.epoch:
            self.gone(address.instance)
        check_hello(hello, address.instance, peer.epoch)
        peer.epoch, peer.hello = hello.epoch, hello
        check_layout(hello, layout)
        return stream

    def _keep(self, address: PeerAddress, stream: PeerStream, streams: _Limited) -> None:
        """Keep a connection on which nothing is under way."""
        peer = self._peers.get(address.instance)
        if peer is None or stream not in peer.busy or streams.late or len(peer.idle) >= self._config.streams:
            return
        streams.remove(stream)
        peer.idle.append((stream, self._loop.call_later(IDLE_S, self._idle_over, peer, stream)))

    def _idle_over(self, peer: _Peer, stream: PeerStream) -> None:
        peer.idle = [each for each in peer.idle if each[0] is not stream]
        stream.close()

    @contextmanager
    def _limited(self, limit_s: float) -> Iterator[_Limited]:
        streams = _Limited(self._loop.time() + limit_s)
        timer = self._loop.call_at(streams.deadline_s, streams.expire)
        try:
            yield streams
        except PeerFault as wrong:
            if streams.late and wrong.code in ("closed", "unreachable"):
                raise PeerFault("late", f"no answer in {limit_s:g} s") from None
            raise
        finally:
            timer.cancel()
            streams.close()

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run `work` in a thread. If this is cancelled, its connection is cut, and the thread is awaited."""
        try:
            job = self._loop.run_in_executor(self._threads, work, *arguments)
        except RuntimeError as wrong:
            raise PeerFault("unreachable", f"there is no thread for it: {wrong}") from None
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            if isinstance(arguments[0], PeerStream):
                arguments[0].cut()
            while not job.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([job])
            if not job.cancelled() and job.exception() is None and isinstance(made := job.result(), PeerStream):
                made.close()
            raise


class _Limited:
    """The connections of one read, and its deadline."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.late = False
        self.whole: set[PeerStream] = set()
        """Connections on which all has come that was asked for."""
        self._streams: dict[PeerStream, set[PeerStream]] = {}

    def add(self, stream: PeerStream, busy: set[PeerStream]) -> None:
        """Add a connection, also to those of its peer."""
        busy.add(stream)
        self._streams[stream] = busy
        if self.late:
            stream.cut()

    def remove(self, stream: PeerStream) -> None:
        """Remove a connection that stays open."""
        self._streams.pop(stream).discard(stream)

    def expire(self) -> None:
        """The deadline has come."""
        self.late = True
        self.cut()

    def cut(self) -> None:
        """End what is under way on all connections."""
        for stream in self._streams:
            stream.cut()

    async def ended(self, pulls: Sequence[asyncio.Future[None]]) -> None:
        """Return when no pull is left; they end at once if any is."""
        while left := [pull for pull in pulls if not pull.done()]:
            self.cut()
            for pull in left:
                pull.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait(left)

    def close(self) -> None:
        """Close the connections that are not kept. No thread uses them."""
        for stream in list(self._streams):
            self.remove(stream)
            stream.close()


# --- in threads


def _connect(address: PeerAddress, limit_s: float) -> PeerStream:
    try:
        return PeerStream(socket.create_connection((address.host, address.port), timeout=max(0.001, limit_s)))
    except OSError as wrong:
        raise PeerFault("unreachable", f"{address.host}:{address.port}: {wrong.strerror or wrong}") from None


def _begin(stream: PeerStream, tls: PeerTls | None) -> PeerAnswer:
    if tls is not None:
        stream.encrypt(tls.reader, server=False)
    return _receive(stream)


def _receive(stream: PeerStream) -> PeerAnswer:
    return decode_answer(stream.receive_frame(FRAME_BYTES_MOST))


def _ask(stream: PeerStream, question: PeerQuestion) -> PeerAnswer:
    stream.send_frame(PEER_QUESTION.encode(question))
    return _receive(stream)


def _take_all(stream: PeerStream, reading: _Reading) -> None:
    """Take what is left, and report at the end that all has come. Raise PeerFault; what came before it is right."""
    while reading.fault is None or reading.fault.code == "checksum":
        try:
            indices = reading.takes.popleft()
        except IndexError:
            break
        number = stream.next_number()
        stream.send_frame(PEER_QUESTION.encode(Take(number, reading.epoch, reading.loan, indices)))
        for index in indices:
            _take_one(stream, reading, number, index)
    stream.send_frame(PEER_QUESTION.encode(Received()))


def _take_one(stream: PeerStream, reading: _Reading, number: int, index: int) -> None:
    header = stream.receive_header(number, index, reading.block_bytes)
    if not header.size_bytes:
        refused = _receive(stream)
        reason = refused.reason[:200] if isinstance(refused, PeerRefused) else "no reason"
        raise PeerFault("refused", f"the peer sends no block of loan {reading.loan}: {reason}")
    slot = reading.places[index]
    assert slot is not None, "it is not wanted"
    with reading.slots.slot(slot) as whole, whole[: reading.block_bytes] as memory:
        checksum = stream.receive_into(memory)
    if checksum == header.checksum:
        reading.written[slot] = checksum
    else:
        reading.fault = PeerFault("checksum", f"block {index} came as {checksum:016x}, not {header.checksum:016x}")
