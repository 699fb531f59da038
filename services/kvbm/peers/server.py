"""The port at which other machines' kvbms read blocks: a thread for each connection, which asks the event loop.

    thread   hello ──▶ question ──▶ loop: KvbmLender.answer ──▶ the answer, or a SendOrder: blocks from the pool
    loop     a timer for each connection: it is cut when no question comes, or what it is sent does not go out;
             silent connections make room for others

A connection is closed, with all that the kernel has queued for it, before the loop is informed: from then on its slots
may be used again.

docs/decisions/0070 gives the reasons.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TypeVar

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from services.kvbm.config import PeersConfig
from services.kvbm.metrics import StoreMetrics
from services.kvbm.peers.lender import KvbmLender, SendBlock, SendOrder
from services.kvbm.peers.messages import (
    PEER_ANSWER,
    PEER_QUESTION,
    QUESTION_BYTES_MOST,
    BlockHeader,
    Located,
    PeerAnswer,
    PeerFault,
    PeerRefused,
    pack_header,
)
from services.kvbm.peers.nixl_messages import NixlReady
from services.kvbm.peers.stream import PeerStream, PeerTls
from shared.errors import ConfigError, ProtocolError
from shared.rate_limited_log import RateLimitedLog

HANDSHAKE_S = 2.0
"""Seconds for TLS; without it, for the first question."""
QUESTION_S = 10.0
"""Seconds from the end of TLS to the first question of a connection."""
SILENT_LIMIT = 8
"""Connections of one address that have not asked yet; one more has the oldest of them cut."""
IDLE_S = 120.0
"""Seconds without a question, after which a connection is closed."""
CLOSE_S = 5.0
"""Seconds that the threads have at the end."""
_LOOP_S = 60.0
"""Seconds that a thread waits for the event loop."""
_NO_CONNECTION = 0.1
"""Seconds until the next try, when the process has no descriptor left for a connection."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class _Connection(Struct, eq=False):
    number: int
    stream: PeerStream
    host: str
    heard_s: float
    """When it was made, or asked last, on the loop's clock."""
    asked: bool = False
    timer: asyncio.TimerHandle | None = None
    late: bool = False
    leaves: bool = False
    """Set once it is cut to make room; its thread ends soon."""


class PeerServer:
    """The listening side, made in the event loop. `make_lender` gets the method that cuts a connection."""

    def __init__(
        self,
        config: PeersConfig,
        tls: PeerTls | None,
        pool: int,
        metrics: StoreMetrics,
        make_lender: Callable[[Callable[[int], None]], KvbmLender],
    ) -> None:
        self.lender = make_lender(self._cut)
        self.faults = RateLimitedLog()
        """Connections that were closed or refused for a fault."""
        self.port = 0
        """The port that it listens at. 0 if it does not."""
        self._config = config
        self._tls = tls
        self._pool = pool
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, _Connection] = {}
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._numbers = 0
        self._none_left = asyncio.Event()
        self._none_left.set()

    def open(self) -> None:
        """Listen. Raise ConfigError."""
        host, port = self._config.address
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listening = socket.create_server((host, port), family=family, backlog=self._config.connections)
        except OSError as wrong:
            raise ConfigError(f"peers.listen: cannot listen on {host}:{port}: {wrong.strerror}") from None
        self._listening.setblocking(False)
        self.port = self._listening.getsockname()[1]
        self._accepting = self._loop.create_task(self._accept(self._listening))

    async def close(self) -> bool:
        """Cut all connections and wait for their threads. Return False if one did not end: it may still read slots."""
        if self._accepting is not None and self._listening is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._listening.close()
        for number in list(self._connections):
            self._cut(number)
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._none_left.wait()
        except TimeoutError:
            _log.error("%d connections of peers did not end in %g s", len(self._connections), CLOSE_S)
            return False
        return True

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                accepted, address = await self._loop.sock_accept(listening)
            except OSError as wrong:
                self.faults.error("peers", f"cannot accept a connection: {wrong.strerror}")
                await asyncio.sleep(_NO_CONNECTION)
                continue
            self._make_room(address[0])
            places = self._config.connections
            staying = sum(not each.leaves for each in self._connections.values())
            if staying >= places or len(self._connections) >= 2 * places:
                self._metrics.peer_faults.labels("lend", "full").inc()
                self.faults.warn(
                    "peers", f"a connection of {address[0]} was closed, as {len(self._connections)} are in use"
                )
                accepted.close()
                continue
            try:
                self._begin(PeerStream(accepted), address[0])
            except (OSError, RuntimeError) as wrong:  # it is closed already, or there can be no further thread
                self.faults.warn("peers", f"a connection of {address[0]} was closed: {wrong}")
                accepted.close()

    def _begin(self, stream: PeerStream, host: str) -> None:
        """Serve a connection in a thread. Raise RuntimeError if there can be none."""
        self._numbers += 1
        connection = _Connection(self._numbers, stream, host, self._loop.time())
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"peer-{connection.number}", daemon=True)
        self._connections[connection.number] = connection
        self._none_left.clear()
        self._arm(connection, HANDSHAKE_S)
        try:
            thread.start()
        except RuntimeError:
            stream.close()
            self._closed(connection, PeerFault("closed", "there can be no further thread"))
            raise

    # --- in the event loop

    def _make_room(self, host: str) -> None:
        """Cut the oldest connection without a question if an address has too many of them, and one that has been idle
        longest if all places are taken: those without a question first. None that sends is cut."""
        there = [each for each in self._connections.values() if not each.leaves]
        silent = [each for each in there if not each.asked and each.host == host]
        if len(silent) >= SILENT_LIMIT:
            self._leave(silent[0], "the address has too many that do not ask")
        elif len(there) >= self._config.connections:
            idle = [each for each in there if not self.lender.loans.is_busy(each.number)]
            if idle:
                self._leave(min(idle, key=lambda each: (each.asked, each.heard_s)), "another one needs its place")

    def _leave(self, connection: _Connection, why: str) -> None:
        self._metrics.peer_faults.labels("lend", "full").inc()
        self.faults.warn("peers", f"a connection of {connection.host} was cut: {why}")
        connection.leaves = True
        connection.stream.cut()

    def _cut(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            connection.stream.cut()

    def _arm(self, connection: _Connection, limit_s: float) -> None:
        if connection.timer is not None:
            connection.timer.cancel()
        connection.timer = self._loop.call_later(limit_s, self._expired, connection)

    def _expired(self, connection: _Connection) -> None:
        connection.late = True
        connection.stream.cut()

    def _answer(self, connection: _Connection, body: bytes) -> PeerAnswer | SendOrder | None:
        question = PEER_QUESTION.decode(body)
        connection.asked, connection.heard_s = True, self._loop.time()
        answer = self.lender.answer(connection.number, question)
        self._arm(connection, self._config.lend_s if isinstance(answer, SendOrder) else IDLE_S)
        if isinstance(answer, PeerRefused):
            self._metrics.peer_faults.labels("lend", "refused").inc()
            self.faults.warn("peers", f"a peer was refused: {answer.reason}")
        return answer

    def _hello(self, connection: _Connection) -> PeerAnswer:
        if self._tls is not None:
            self._arm(connection, QUESTION_S)
        return self.lender.hello()

    def _closed(self, connection: _Connection, fault: PeerFault) -> None:
        if connection.timer is not None:
            connection.timer.cancel()
        self._connections.pop(connection.number, None)
        sending = self.lender.loans.is_busy(connection.number)
        self.lender.closed(connection.number)
        expected = fault.code == "closed" and not sending  # an idle connection may be closed at any time
        if not (expected or connection.leaves):
            code = "late" if connection.late and fault.code == "closed" else fault.code
            self._metrics.peer_faults.labels("lend", code).inc()
            self.faults.warn("peers", f"the connection of {connection.host} was closed: {code}: {fault}")
        if not self._connections:
            self._none_left.set()

    # --- in a connection's thread

    def _serve(self, connection: _Connection) -> None:
        stream = connection.stream
        fault = PeerFault("closed", "closed")
        try:
            if self._tls is not None:
                reading = asyncio.run_coroutine_threadsafe(self._tls.current(), self._loop)
                stream.encrypt(reading.result(_LOOP_S).lender, server=True)
            stream.send_frame(PEER_ANSWER.encode(self._in_loop(lambda: self._hello(connection))))
            while True:
                body = stream.receive_frame(QUESTION_BYTES_MOST)
                answer = self._in_loop(lambda body=body: self._answer(connection, body))  # type: ignore[misc]
                if isinstance(answer, SendOrder) and answer.agent is not None:
                    self._locate(stream, answer, answer.agent)
                elif isinstance(answer, SendOrder):
                    self._send(stream, answer)
                elif isinstance(answer, PeerRefused):
                    self._refuse(stream, answer)
                elif answer is not None:
                    stream.send_frame(PEER_ANSWER.encode(answer))
        except PeerFault as wrong:
            fault = wrong
        except ProtocolError as wrong:
            fault = PeerFault("garbage", str(wrong)[:200])
        except (RuntimeError, TimeoutError, CancelledError):
            pass  # the event loop has ended, or stands still
        finally:
            stream.close()
            with suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._closed, connection, fault)

    def _send(self, stream: PeerStream, order: SendOrder) -> None:
        summed: dict[int, int] = {}
        for each in order.blocks:
            if order.slots.generation(each.slot) != each.generation:
                reason = f"block {each.index} was discarded, since it may be wrong"
                self._refuse(stream, PeerRefused(order.number, "unknown_loan", reason, True))
                return
            with order.slots.slot(each.slot) as whole, whole[: order.block_bytes] as memory:
                checksum = _checksum(each, memory, summed)
                header = BlockHeader(order.number, each.index, order.block_bytes, checksum)
                stream.send_slot(header, self._pool, order.slots.arena.offset_of(each.slot), memory)
        self._summed(order.loan, summed)

    def _locate(self, stream: PeerStream, order: SendOrder, agent: NixlReady) -> None:
        """Send where the blocks lie. They are held as those of a Take, until the peer's next word."""
        checksums: list[int] = []
        summed: dict[int, int] = {}
        for each in order.blocks:
            if order.slots.generation(each.slot) != each.generation:
                reason = f"block {each.index} was discarded, since it may be wrong"
                self._refuse(stream, PeerRefused(order.number, "unknown_loan", reason))
                return
            with order.slots.slot(each.slot) as whole, whole[: order.block_bytes] as memory:
                checksums.append(_checksum(each, memory, summed))
        self._summed(order.loan, summed)
        addresses = [agent.base + order.slots.arena.offset_of(each.slot) for each in order.blocks]
        stream.send_frame(PEER_ANSWER.encode(Located(order.number, agent.metadata, addresses, checksums)))

    def _summed(self, loan: int, summed: dict[int, int]) -> None:
        """Have the checksums of blocks that had none recorded: no further read computes them."""
        if summed:
            self._loop.call_soon_threadsafe(self.lender.record_checksums, loan, summed)

    def _refuse(self, stream: PeerStream, refused: PeerRefused) -> None:
        """Send a refusal; of a Take it stands where the next block would."""
        if refused.of_take:
            stream.send_raw(pack_header(BlockHeader(refused.number, 0, 0, 0)))
        stream.send_frame(PEER_ANSWER.encode(refused))

    def _in_loop(self, work: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as wrong:  # noqa: BLE001 - the thread raises it, and closes its connection
                done.set_exception(wrong)

        self._loop.call_soon_threadsafe(run)
        return done.result(_LOOP_S)


def _checksum(block: SendBlock, memory: memoryview, summed: dict[int, int]) -> int:
    """Return the block's checksum. If it is not known, compute it, and add it to `summed`."""
    if not block.checksum:
        summed[block.slot] = xxh3_64_intdigest(memory)
    return block.checksum or summed[block.slot]
