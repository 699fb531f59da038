"""One connection to NATS, from its first byte to its loss. `nats_bus.py` makes one after another.

    dial:  TCP ─▶ INFO ─▶ TLS, where it is asked for ─▶ CONNECT, PING ─▶ PONG ──▶ open ──▶ lost
                                                                                    │
         closed here, the server's end, an error, what is no NATS, two PINGs without an answer

Nothing waits here but for the server: what comes is handed over in the turn of the loop that read it, and what is said
in one turn is sent together at its end: a turn costs 1 µs, a write that wakes the server 10 to 100. Over
UNSENT_LIMIT_BYTES a publisher must wait.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from typing import assert_never, cast
from urllib.parse import urlsplit

from shared import nats_wire
from shared.config import NatsConfig
from shared.errors import BusDown, ConfigError, HeadraceError, ProtocolError
from shared.messaging import Message
from shared.nats_wire import Delivery, Info, Ping, Pong, Refusal, Wire
from shared.version import VERSION

CONNECT_LIMIT_S = 2.0
PING_INTERVAL_S = 10.0
PINGS_LIMIT = 2
"""Without an answer; then the connection is given up."""
UNSENT_LIMIT_BYTES = 2 << 20
TURN_LIMIT_BYTES = 64 << 10
"""Said in one turn of the loop; then it is sent before the turn ends."""
UNSENT_WAIT_S = 2.0
"""A publisher waits this long for the server to take what is unsent, then gets BusDown."""
FAILURES = (BusDown, ProtocolError, OSError, UnicodeError)
"""What `dial` raises: the last one for what is no host's name."""


class Connection(asyncio.Protocol):
    """Made by `dial`."""

    def __init__(self, failed: Callable[[HeadraceError], None]) -> None:
        """`failed` hears of what went wrong while the connection goes on: BusDown for the server's refusals,
        ProtocolError for messages that cannot be read."""
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        """Why, once it is."""
        self._info = Info()
        self._informed: asyncio.Future[None] = self._loop.create_future()
        self._failed = failed
        self._wire = Wire()
        self._transport: asyncio.Transport | None = None
        self._sids = count(1)
        self._takers: dict[int, Callable[[Message], None]] = {}
        self._pongs: deque[asyncio.Future[None]] = deque()
        """Of the PINGs that are not answered, oldest first."""
        self._said: list[bytes] = []
        """In this turn of the loop."""
        self._said_bytes = 0
        self._room = asyncio.Event()
        """The transport takes more."""
        self._room.set()
        self._freed = asyncio.Event()
        """The transport is no more."""
        self._refused = ""
        """Why the server is about to close it."""
        self._pinging: asyncio.TimerHandle | None = None

    # --- state

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self.lost.done()

    @property
    def has_room(self) -> bool:
        """Whether one may publish without waiting."""
        return self._room.is_set()

    @property
    def max_payload(self) -> int:
        return self._info.max_payload

    async def room(self) -> None:
        """Until one may publish. Raises BusDown after UNSENT_WAIT_S."""
        try:
            async with asyncio.timeout(UNSENT_WAIT_S):
                await self._room.wait()
        except TimeoutError:
            raise BusDown(f"NATS has not taken what was published for {UNSENT_WAIT_S:g} s") from None

    # --- what is sent

    def publish(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        """`subject` and `reply` are checked already. Raises BusDown, and ProtocolError for what is no header."""
        if not self.is_open:
            raise BusDown("the connection to NATS is lost")
        self._write(nats_wire.publish(subject, reply, payload, headers))

    def listen(self, subject: str, queue: str, take: Callable[[Message], None]) -> int:
        """Subscribe; the subscription's number."""
        sid = next(self._sids)
        self._takers[sid] = take
        self._write(nats_wire.subscribe(subject, queue, sid))
        return sid

    def leave(self, sid: int) -> None:
        """Unsubscribe; what is still to come is dropped."""
        if self._takers.pop(sid, None) is not None:
            self._write(nats_wire.unsubscribe(sid))

    async def drain(self, sid: int) -> None:
        """Unsubscribe, and return when all that the server sent has been handed over. Raises BusDown."""
        self._write(nats_wire.unsubscribe(sid))
        try:
            await self.sync()
        finally:
            self._takers.pop(sid, None)

    async def sync(self) -> None:
        """Returns when the server has done all that was asked before, and what it sent before was handed over. Raises
        BusDown."""
        if not self.is_open:
            raise BusDown("the connection to NATS is lost")
        pong = self._ping()
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                await pong
        except TimeoutError:
            raise BusDown(f"NATS has not answered for {CONNECT_LIMIT_S:g} s") from None

    async def close(self) -> None:
        """At once: who wants to be sure of what was sent calls `sync` before."""
        self._abort("closed")
        if self._transport is not None:
            await self._freed.wait()

    def _abort(self, why: str) -> None:
        self._lose(why)
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if not self._said:
            self._loop.call_soon(self._flush)
        self._said.append(data)
        self._said_bytes += len(data)
        if self._said_bytes > TURN_LIMIT_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._said and self._transport is not None and not self.lost.done():
            self._transport.writelines(self._said)
        self._said = []
        self._said_bytes = 0

    def _ping(self) -> asyncio.Future[None]:
        pong: asyncio.Future[None] = self._loop.create_future()
        self._pongs.append(pong)
        self._write(nats_wire.PING)
        return pong

    # --- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._transport.set_write_buffer_limits(UNSENT_LIMIT_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            for said in self._wire.feed(data):
                if isinstance(said, Delivery):
                    self._deliver(said)
                else:
                    self._hear(said)
        except ProtocolError as wrong:
            self._abort(str(wrong))

    def connection_lost(self, exc: Exception | None) -> None:
        self._freed.set()
        self._lose(self._refused or (str(exc) if exc else "the server closed it"))

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def _deliver(self, delivery: Delivery) -> None:
        take = self._takers.get(delivery.sid)
        if take is None:
            return
        try:
            message = delivery.message()
        except ProtocolError as wrong:
            self._failed(wrong)
        else:
            take(message)

    def _hear(self, said: Info | Ping | Pong | Refusal) -> None:
        match said:
            case Info():
                self._info = said
                if not self._informed.done():
                    self._informed.set_result(None)
            case Ping():
                self._write(nats_wire.PONG)
            case Pong():
                if self._pongs and not (pong := self._pongs.popleft()).done():
                    pong.set_result(None)
            case Refusal():
                if not said.text.startswith("Permissions Violation"):  # all others end the connection
                    self._refused = said.text
                self._failed(BusDown(said.text))
            case _:
                assert_never(said)

    def _lose(self, why: str) -> None:
        """Idempotent."""
        if self.lost.done():
            return
        self.lost.set_result(why)
        self._room.set()  # whoever waits to publish sees the loss then
        if self._pinging is not None:
            self._pinging.cancel()
        for waits in (*self._pongs, self._informed):
            if not waits.done():
                waits.set_exception(BusDown(f"NATS: {why}"))
                waits.exception()  # nobody may be waiting
        self._pongs.clear()
        self._takers.clear()

    # --- the beginning, and staying alive

    async def greet(self, config: NatsConfig, name: str) -> None:
        """From the TCP connection to an open one. Raises BusDown, and what TLS raises."""
        await self._informed
        parts = urlsplit(config.url)
        if parts.scheme == "tls" or self._info.tls_required:
            assert self._transport is not None
            secured = await self._loop.start_tls(
                self._transport, self, ssl.create_default_context(), server_hostname=parts.hostname
            )
            if secured is None:
                raise BusDown("NATS: the connection was lost during its TLS handshake")
            self.connection_made(secured)
        user, password = (config.user, config.password) if config.user else (parts.username, parts.password)
        self._write(nats_wire.connect(name=name, version=VERSION, user=user or "", password=password or ""))
        await self._ping()
        self._stay_alive()

    def _stay_alive(self, pong: asyncio.Future[None] | None = None, unanswered: int = 0) -> None:
        """Every PING_INTERVAL_S: `pong` is the answer to the last PING, `unanswered` how many had none before it."""
        if pong is not None and not pong.done():
            unanswered += 1
        else:
            unanswered = 0
        if unanswered >= PINGS_LIMIT:
            self._abort("it does not answer")
        elif self.is_open:
            self._pinging = self._loop.call_later(PING_INTERVAL_S, self._stay_alive, self._ping(), unanswered)


async def dial(config: NatsConfig, name: str, failed: Callable[[HeadraceError], None]) -> Connection:
    """An open connection. Raises one of FAILURES."""
    parts = urlsplit(config.url)
    host = parts.hostname or ""
    connection = Connection(failed)
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            await asyncio.get_running_loop().create_connection(lambda: connection, host, parts.port or 4222)
            await connection.greet(config, name)
    except BaseException:
        await connection.close()
        raise
    return connection


def check_url(url: str) -> None:
    """Raises ConfigError where it is not nats://host:port."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("nats", "tls") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"nats.url: {shown(url)} is not nats://host:port")


def shown(url: str) -> str:
    """A URL without its password."""
    before, at, host = url.rpartition("@")
    return f"{before.partition('://')[0]}://…@{host}" if at else url
