"""The bus over NATS.

    connecting ──▶ connected ──▶ closed
         ▲             │           ▲
         └── lost ─────┘           └── drain, from either

One connection after the other, for ever: the first one, an outage, a refused password and a server that closes the
connection all take the same path. What survives is ours: subscriptions with what waits in them. Requests and streams
that were open fail with BusDown, because their answers may have been lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from shared import subjects
from shared.complaint import Complaint, Tally
from shared.config import NatsConfig
from shared.errors import BusDown, HeadraceError, PayloadTooLarge, ProtocolError, RequestTimeout
from shared.messaging import Message, Receive, SubscriptionStatistics
from shared.nats_connection import FAILURES, Connection, check_url, dial, shown
from shared.receiver import Receiver
from shared.replies import Replies

RETRY_WAIT_S = 0.25
WATCH_INTERVAL_S = 0.05
COMPLAIN_INTERVAL_S = 5.0

_log = logging.getLogger(__name__)


async def connect(config: NatsConfig, name: str) -> NatsBus:
    """A bus that is connected; waits for NATS as long as it takes. `name` shows in NATS's monitoring.

    Raises ConfigError where the URL is none.
    """
    check_url(config.url)
    bus = NatsBus(config, name)
    try:
        await bus.wait_connected()
    except BaseException:
        await bus.drain()
        raise
    return bus


class NatsSubscription:
    """One subscription, the same across connections."""

    def __init__(self, bus: NatsBus, subject: str, queue: str, receiver: Receiver) -> None:
        self._bus = bus
        self._subject = subject
        self._queue = queue
        self._receiver = receiver
        self._connection: Connection | None = None
        self._sid = 0
        """On that connection."""

    def statistics(self) -> SubscriptionStatistics:
        return self._receiver.statistics()

    async def unsubscribe(self) -> None:
        self._bus.forget(self)
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await connection.drain(self._sid)
            except BusDown as wrong:  # the subscription ended with its connection
                _log.debug("unsubscribing from %s: %s", self._subject, wrong)
        await self._receiver.drain()

    def is_on(self, connection: Connection) -> bool:
        return self._connection is connection

    def attach(self, connection: Connection) -> None:
        """Subscribe on a new connection."""
        self._connection = connection
        self._sid = connection.listen(self._subject, self._queue, self._receiver.offer)


class NatsBus:
    """See `shared.messaging.Bus`; made by `connect`."""

    def __init__(self, config: NatsConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._replies = Replies(config.inbox)
        self._subscriptions: list[NatsSubscription] = []
        self._connection: Connection | None = None
        self._closed = False
        self._malformed = Tally()
        self._torn = Complaint("unreadable message from NATS", self._malformed)
        self._complained_at = -math.inf
        self._reported_at = -math.inf
        self._keeper = asyncio.get_running_loop().create_task(self._keep_connected(), name="nats connection")

    @property
    def connected(self) -> bool:
        return self._connection is not None and self._connection.is_open

    @property
    def malformed(self) -> int:
        """Those whose very subject or headers cannot be read included."""
        return self._malformed.count

    async def wait_connected(self) -> None:
        """Returns once there is a connection."""
        while not self.connected:
            if self._keeper.done():
                self._keeper.result()
                raise BusDown("the bus is closed")
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        gone: Callable[[], None] | None = None,
    ) -> None:
        connection = self._check(subject, payload)
        if not connection.has_room:
            await connection.room()
        connection.publish(subject, payload, "" if gone is None else self._replies.probe(gone), headers)

    async def subscribe(
        self,
        subject: str,
        receive: Receive,
        *,
        queue: str = "",
        pending_limit: int = 65536,
        dropped: Callable[[int], None] | None = None,
    ) -> NatsSubscription:
        """The server knows of it when this returns; while NATS is away, once it is back."""
        subjects.check(subject, wildcards=True)
        if self._closed:
            raise BusDown("the bus is closed")
        receiver = Receiver(subject, receive, pending_limit=pending_limit, dropped=dropped, malformed=self._malformed)
        subscription = NatsSubscription(self, subject, queue, receiver)
        self._subscriptions.append(subscription)
        connection = self._connection
        if connection is not None:
            subscription.attach(connection)
            try:
                await connection.sync()
            except BusDown as wrong:  # the next connection will carry it
                _log.debug("subscribing to %s: %s", subject, wrong)
        return subscription

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Message:
        connection = self._check(subject, payload)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        reply, answer = self._replies.request(subject)
        # A timer that fails the answer, for an asyncio.timeout() has twice its price.
        timer = loop.call_at(until_s, _late, answer, f"no answer from {subject} in {timeout_s:g} s")
        try:
            if not connection.has_room:
                async with asyncio.timeout_at(until_s):
                    await connection.room()
            connection.publish(subject, payload, reply, headers)
            return await answer
        except TimeoutError:
            raise RequestTimeout(f"no room for a question to {subject} in {timeout_s:g} s") from None
        finally:
            timer.cancel()
            self._replies.forget(reply)

    @asynccontextmanager
    async def stream(
        self,
        subject: str,
        payload: bytes,
        *,
        idle_timeout_s: float,
        headers: Mapping[str, str] | None = None,
        pending_limit: int = 8192,
    ) -> AsyncIterator[AsyncIterator[Message]]:
        connection = self._check(subject, payload)
        stream = self._replies.stream(subject, pending_limit)
        sid = connection.listen(stream.inbox, "", stream.take)
        try:
            if not connection.has_room:
                await connection.room()
            connection.publish(subject, payload, stream.inbox, headers)
            yield stream.messages(idle_timeout_s)
        finally:
            self._replies.end(stream)
            connection.leave(sid)

    async def drain(self) -> None:
        self._closed = True
        try:
            async with asyncio.TaskGroup() as tasks:
                for subscription in list(self._subscriptions):
                    tasks.create_task(subscription.unsubscribe())
        finally:
            await self._close()

    async def _close(self) -> None:
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                if connection.is_open:
                    await connection.sync()
            except BusDown as wrong:
                _log.warning("what was published last may not have reached NATS: %s", wrong)
            finally:
                await connection.close()
        self._replies.fail(BusDown("the bus is closed"))

    def forget(self, subscription: NatsSubscription) -> None:
        """It was unsubscribed."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def _check(self, subject: str, payload: bytes) -> Connection:
        """The connection to send them on."""
        connection = self._connection
        if connection is None or not connection.is_open:
            raise BusDown("the bus is closed" if self._closed else f"no connection to {shown(self._config.url)}")
        limit = min(self._config.payload_limit_bytes, connection.max_payload)
        if len(payload) > limit:
            raise PayloadTooLarge(len(payload), limit)
        subjects.check(subject)
        return connection

    # --- the connection

    async def _keep_connected(self) -> None:
        while True:
            connection = await self._connect()
            if connection is not None:
                _log.info("connected to NATS at %s", shown(self._config.url))
                if connection.max_payload < self._config.payload_limit_bytes:
                    _log.warning("NATS's max_payload is %d bytes, below our payload limit", connection.max_payload)
                why = await connection.lost
                self._connection = None
                self._replies.fail(BusDown("the connection to NATS was lost"))
                _log.warning("lost the connection to NATS at %s: %s", shown(self._config.url), why)
            await asyncio.sleep(RETRY_WAIT_S)

    async def _connect(self) -> Connection | None:
        """One connection with every subscription on it, or None."""
        connection: Connection | None = None
        try:
            connection = await dial(self._config, self._name, self._report)
            connection.listen(self._replies.prefix + "*", "", self._replies.take)
            while missing := [each for each in self._subscriptions if not each.is_on(connection)]:
                for subscription in missing:
                    subscription.attach(connection)
                await connection.sync()  # connected means that the server knows them all
            self._connection = connection
        except FAILURES as wrong:
            self._complain(wrong)
        finally:
            if connection is not None and self._connection is not connection:
                await connection.close()
        return self._connection

    def _report(self, wrong: HeadraceError) -> None:
        """Something went wrong on a live connection; most often, a user may not publish or subscribe somewhere."""
        if isinstance(wrong, ProtocolError):
            self._torn.add(wrong)
            return
        now = asyncio.get_running_loop().time()
        if self.connected and now - self._reported_at >= COMPLAIN_INTERVAL_S:
            self._reported_at = now
            _log.error("NATS: %s", wrong)

    def _complain(self, wrong: Exception) -> None:
        """A connection could not be made; said at once and then every few seconds."""
        now = asyncio.get_running_loop().time()
        if now - self._complained_at < COMPLAIN_INTERVAL_S:
            return
        self._complained_at = now
        if "Authorization Violation" in str(wrong):
            _log.error("NATS at %s refuses user %r; trying on", shown(self._config.url), self._config.user)
        else:
            _log.warning("waiting for NATS at %s: %s", shown(self._config.url), str(wrong) or type(wrong).__name__)


def _late(answer: asyncio.Future[Message], why: str) -> None:
    if not answer.done():
        answer.set_exception(RequestTimeout(why))
