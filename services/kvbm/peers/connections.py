"""A reader's connections to the kvbms of other machines: opened, checked, kept, and cut.

    connected ──▶ the peer's hello is what it was, of the same back end, and has the layout ──▶ ask … ──▶ keep
    a deadline, `gone`, a cancellation ──▶ what is under way is cut ──▶ its thread ends

All deadlines are timers of the event loop, which cut; no thread outlives the read that it works for.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar, runtime_checkable

from msgspec import Struct, field

from services.kvbm.config import PeersConfig
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
    Return,
    check_backend,
    check_counted,
    check_hello,
    check_layout,
    check_lent,
    decode_answer,
)
from services.kvbm.peers.stream import PeerStream, PeerTls
from shared.hashing import ContentKey
from shared.messages.kvbm import StoreLayout

IDLE_S = 60.0
"""Seconds that an unused connection is kept."""
CONNECT_S = 5.0
"""Seconds for a connection, with TLS and the peer's hello."""

T = TypeVar("T")


@runtime_checkable
class Cuttable(Protocol):
    """What a read uses in a thread: a connection, or a process."""

    def cut(self) -> None:
        """End every call that waits for it. Any thread may call it at any time."""
        ...

    def close(self) -> None:
        """Give it up, after the last call has returned. A process may take its time to end, so wait in a thread."""
        ...


class _Peer(Struct):
    address: PeerAddress
    epoch: int | None = None
    hello: PeerHello | None = None
    idle: list[tuple[PeerStream, asyncio.TimerHandle]] = field(default_factory=list)
    busy: set[Cuttable] = field(default_factory=set)


class PeerConnections:
    """The connections of one kvbm to all others. `hello` says what this kvbm is to them."""

    def __init__(self, config: PeersConfig, tls: PeerTls | None, hello: Callable[[], PeerHello]) -> None:
        self.hello = hello
        self._config = config
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, _Peer] = {}
        self._threads = ThreadPoolExecutor(config.reads * config.streams + config.reads, "peer-read")

    async def leading(self, peer: PeerAddress, layout: StoreLayout, keys: Sequence[ContentKey], limit_s: float) -> int:
        """Return how many leading blocks the peer has in memory. Raise PeerFault."""
        async with self.limited(limit_s) as parts:
            stream = await self.connected(peer, layout, parts)
            number = stream.next_number()
            answer = await self.ask(stream, Count(number, layout.digest, b"".join(keys)))
            counted = check_counted(answer, number, len(keys))
            self.keep(peer, stream, parts)
            return counted

    async def borrow(
        self, peer: PeerAddress, stream: PeerStream, layout: StoreLayout, keys: Sequence[ContentKey]
    ) -> tuple[Lent, int]:
        """Borrow leading blocks of these keys; return the loan and the peer's epoch. Raise PeerFault."""
        known = self._peers.get(peer.instance)
        if known is None or (epoch := known.epoch) is None:
            raise PeerFault("closed", "the peer has left")
        number = stream.next_number()
        answer = await self.ask(stream, Borrow(number, epoch, layout, b"".join(keys)))
        return check_lent(answer, number, keys), epoch

    async def give_back(self, peer: PeerAddress, stream: PeerStream, loan: int, parts: ReadParts) -> None:
        """Return a loan, and keep its connection. A fault of it is no fault of the read."""
        with suppress(PeerFault):
            number = stream.next_number()
            check_counted(await self.ask(stream, Return(number, loan)), number, 0)
            self.keep(peer, stream, parts)

    def gone(self, instance: str) -> None:
        """Close the connections to a peer that has left; its reads end."""
        peer = self._peers.pop(instance, None)
        if peer is not None:
            for stream, timer in peer.idle:
                timer.cancel()
                stream.close()
            for busy in peer.busy:
                busy.cut()

    def close(self) -> None:
        """End the connections and threads, after all reads."""
        for instance in list(self._peers):
            self.gone(instance)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def busy_with(self, peer: PeerAddress) -> set[Cuttable]:
        """Return what is under way with a peer, to be added to. Raise PeerFault if it has left."""
        known = self._peers.get(peer.instance)
        if known is None:
            raise PeerFault("closed", "the peer has left")
        return known.busy

    # --- one connection

    async def connected(self, address: PeerAddress, layout: StoreLayout, parts: ReadParts) -> PeerStream:
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
            parts.add(stream, peer.busy)
            assert peer.hello is not None, "it was connected"
            if not any(theirs.digest == layout.digest for theirs in peer.hello.layouts):
                continue  # a new connection tells which layouts it has by now
            check_layout(peer.hello, layout)
            return stream
        limit_s = min(CONNECT_S, parts.deadline_s - self._loop.time())
        stream = await self.in_thread(_connect, address, limit_s)
        parts.add(stream, peer.busy)
        if self._peers.get(address.instance) is not peer:
            raise PeerFault("closed", "the peer has left")
        first_frame = await self.in_thread(_begin, stream, await self._reader_tls(parts.deadline_s))
        hello = check_hello(first_frame, address.instance, None)
        if peer.epoch is not None and hello.epoch != peer.epoch:
            self.gone(address.instance)
        check_hello(hello, address.instance, peer.epoch)
        peer.epoch, peer.hello = hello.epoch, hello
        check_backend(hello, self.hello())
        check_layout(hello, layout)
        return stream

    async def _reader_tls(self, deadline_s: float) -> ssl.SSLContext | None:
        """Return the TLS of a new connection. None if there is none. Raise PeerFault."""
        if self._tls is None:
            return None
        try:
            async with asyncio.timeout_at(deadline_s):
                return (await self._tls.current()).reader
        except TimeoutError:
            raise PeerFault("unreachable", "the files of TLS were not read in time") from None

    def keep(self, address: PeerAddress, stream: PeerStream, parts: ReadParts) -> None:
        """Keep a connection on which nothing is under way."""
        peer = self._peers.get(address.instance)
        if peer is None or stream not in peer.busy or parts.late or len(peer.idle) >= self._config.streams:
            return
        parts.remove(stream)
        peer.idle.append((stream, self._loop.call_later(IDLE_S, self._idle_over, peer, stream)))

    def _idle_over(self, peer: _Peer, stream: PeerStream) -> None:
        peer.idle = [each for each in peer.idle if each[0] is not stream]
        stream.close()

    @asynccontextmanager
    async def limited(self, limit_s: float) -> AsyncIterator[ReadParts]:
        """Bound what is done within: it is cut at the deadline, and closed at the end unless it is kept."""
        parts = ReadParts(self._loop.time() + limit_s)
        timer = self._loop.call_at(parts.deadline_s, parts.expire)
        try:
            yield parts
        except PeerFault as wrong:
            if parts.late and wrong.code in ("closed", "unreachable"):
                raise PeerFault("late", f"no answer in {limit_s:g} s") from None
            raise
        finally:
            timer.cancel()
            await self.closed(parts.take())

    async def ask(self, stream: PeerStream, question: PeerQuestion) -> PeerAnswer:
        """Ask one question, and return the answer. Raise PeerFault."""
        return await self.in_thread(_ask, stream, question)

    async def in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run `work` in a thread. If this is cancelled, its first argument is cut, and the thread is awaited."""
        try:
            job = self._loop.run_in_executor(self._threads, work, *arguments)
        except RuntimeError as wrong:
            raise PeerFault("unreachable", f"there is no thread for it: {wrong}") from None
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            if arguments and isinstance(first := arguments[0], Cuttable):
                first.cut()
            with suppress(asyncio.CancelledError):
                await all_done([job])
            if not job.cancelled() and job.exception() is None and isinstance(made := job.result(), Cuttable):
                await self.closed([made])
            raise

    async def closed(self, parts: Collection[Cuttable]) -> None:
        """Close these, which no thread uses, in threads; return when all have ended, also if this is cancelled. Raise
        ExceptionGroup: some could not be closed, and may still be at work."""
        jobs: list[asyncio.Future[None]] = []
        for part in parts:
            try:
                jobs.append(self._loop.run_in_executor(self._threads, part.close))
            except RuntimeError:  # there is no thread for it, and it must have ended all the same
                jobs.append(asyncio.ensure_future(_close_here(part)))
        try:
            await all_done(jobs)
        finally:
            failed = [wrong for job in jobs if (wrong := job.exception()) is not None]
            if failed:
                raise BaseExceptionGroup("not all that a read used could be closed", failed)


class ReadParts:
    """What one read uses: its connections, its process; and its deadline."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.late = False
        self.whole: set[Cuttable] = set()
        """Connections on which all has come that was asked for."""
        self._parts: dict[Cuttable, set[Cuttable]] = {}

    def add(self, part: Cuttable, busy: set[Cuttable]) -> None:
        """Add a connection or process, also to those of its peer."""
        busy.add(part)
        self._parts[part] = busy
        if self.late:
            part.cut()

    def remove(self, part: Cuttable) -> None:
        """Remove one that is kept."""
        self._parts.pop(part).discard(part)

    def expire(self) -> None:
        """The deadline has come."""
        self.late = True
        self.cut()

    def cut(self) -> None:
        """End what is under way on all of them."""
        for part in self._parts:
            part.cut()

    async def ended(self, pulls: Sequence[asyncio.Future[None]]) -> None:
        """Return when no pull is left; they end at once if any is."""
        if left := [pull for pull in pulls if not pull.done()]:
            self.cut()
            for pull in left:
                pull.cancel()
            with suppress(asyncio.CancelledError):
                await all_done(left)

    def take(self) -> list[Cuttable]:
        """Remove those that are not kept, and return them: they must be closed."""
        parts = list(self._parts)
        for part in parts:
            self.remove(part)
        return parts


async def all_done(jobs: Collection[asyncio.Future[Any]]) -> None:
    """Return when all of these have ended. If this is cancelled, it waits on, and raises CancelledError then."""
    cancelled = False
    while left := [job for job in jobs if not job.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


async def _close_here(part: Cuttable) -> None:
    part.close()


# --- in threads


def _connect(address: PeerAddress, limit_s: float) -> PeerStream:
    try:
        return PeerStream(socket.create_connection((address.host, address.port), timeout=max(0.001, limit_s)))
    except OSError as wrong:
        raise PeerFault("unreachable", f"{address.host}:{address.port}: {wrong.strerror or wrong}") from None


def _begin(stream: PeerStream, tls: ssl.SSLContext | None) -> PeerAnswer:
    if tls is not None:
        stream.encrypt(tls, server=False)
    return receive_answer(stream)


def receive_answer(stream: PeerStream) -> PeerAnswer:
    """Receive one answer, in a thread. Raise PeerFault."""
    return decode_answer(stream.receive_frame(FRAME_BYTES_MOST))


def _ask(stream: PeerStream, question: PeerQuestion) -> PeerAnswer:
    stream.send_frame(PEER_QUESTION.encode(question))
    return receive_answer(stream)
