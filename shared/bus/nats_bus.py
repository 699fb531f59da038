"""The bus over NATS.

    connecting ──▶ connected ──▶ closed
         ▲             │           ▲
         └── lost ─────┘           └── drain, from either

There is one connection after the other, without end. Each is a nats-py client that does not reconnect by itself. So
the first connection, an outage, a refused password and a server that closes the connection, or asks its clients to
leave, all take the same path. The next server of a cluster is tried at once; there is a pause after all have failed.
Subscriptions survive a connection, with the messages that wait in them. Open requests and streams fail with BusDown,
because their answers may be lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from random import SystemRandom

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription as RemoteSubscription
from nats.js import JetStreamContext

from shared import subjects
from shared.bus.contract import Message, Receive, SubscriptionStatistics
from shared.bus.inbox import ReplyInbox
from shared.bus.nats_access import check_settings, refusal_text
from shared.bus.nats_connection import (
    FAILURES,
    UNSENT_LIMIT_BYTES,
    DirectClient,
    abort,
    as_headrace_error,
    dial,
    drain,
    is_reading,
    reading_ended,
    sync,
    unsubscribe_now,
    wait_sent,
)
from shared.bus.nats_servers import server_urls, without_password
from shared.bus.receive_queue import ReceiveQueue
from shared.config import NatsConfig
from shared.errors import BusDown, ConfigError, PayloadTooLarge, ProtocolError
from shared.file_reads import FileReads
from shared.rate_limited_log import RateLimitedLog
from shared.server_order import ServerOrder

RETRY_WAIT_S, RETRY_LIMIT_S = 0.25, 1.0
"""The pause after the first round over all servers, and the longest one."""
SHORT_S = 1.0
"""A connection that was lost sooner than this many seconds is followed by a pause, whichever server is next."""
WATCH_INTERVAL_S = 0.05
LOOK_AGAIN_S = 1.0
COMPLAIN_INTERVAL_S = 5.0

_log = logging.getLogger(__name__)


async def connect(config: NatsConfig, name: str, refused: Callable[[str], None] = lambda _why: None) -> NatsBus:
    """Return a connected bus; wait for NATS as long as it takes. `name` is shown in NATS's monitoring.

    Until the first connection, `refused` is called each time that all servers have failed, with the reasons of those
    that refused, which may be an empty text. An error that it raises ends the wait.

    Raise ConfigError if a URL is invalid, or a file that `config` names cannot be used.
    """
    check_settings(config)
    bus = NatsBus(config, name, refused=refused)
    try:
        await bus.wait_connected()
    except BaseException:
        await bus.drain()
        raise
    return bus


class NatsSubscription:
    """One subscription, which lives across connections."""

    def __init__(self, bus: NatsBus, subject: str, queue: str, receiver: ReceiveQueue) -> None:
        self._bus = bus
        self._subject = subject
        self._queue = queue
        self._receiver = receiver
        self._closed = False
        self._client: DirectClient | None = None
        self._remote: RemoteSubscription | None = None

    def statistics(self) -> SubscriptionStatistics:
        return self._receiver.statistics()

    async def unsubscribe(self) -> None:
        self._closed = True
        self._bus.forget(self)
        remote, self._remote = self._remote, None
        if remote is not None and self._client is not None:
            await drain(self._client, remote)
        await self._receiver.drain()

    def is_on(self, client: Client) -> bool:
        return self._client is client

    async def attach(self, client: DirectClient) -> None:
        """Subscribe on a new connection."""
        self._client = client
        remote = await client.subscribe_direct(self._subject, self._receiver.offer, self._queue)
        if self._closed:
            await unsubscribe_now(remote)
        else:
            self._remote = remote


class NatsBus:
    """The bus of `shared.bus.contract` over NATS. `connect` waits for a connection; the constructor does not.

    It must be made in a running event loop. Raise ConfigError if a URL is invalid.
    """

    def __init__(
        self,
        config: NatsConfig,
        name: str,
        *,
        refused: Callable[[str], None] = lambda _why: None,
        unreadable: RateLimitedLog | None = None,
    ) -> None:
        """`refused` is that of `connect`. `unreadable` logs and counts unreadable messages; two buses may share it."""
        self._config = config
        self._order = ServerOrder(server_urls(config.url), SystemRandom())
        self._name = name
        self._refused = refused
        self._refusals: dict[str, str] = {}
        """URL → why that server refused the last attempt, or an empty text."""
        self._replies = ReplyInbox(config.inbox)
        self._reads = FileReads()
        self._subscriptions: list[NatsSubscription] = []
        self._client: DirectClient | None = None
        self._closed = False
        self.connections = 0
        self.unreadable = RateLimitedLog() if unreadable is None else unreadable
        self._outages = RateLimitedLog(COMPLAIN_INTERVAL_S)
        self._keeper = asyncio.get_running_loop().create_task(self._keep_connected(), name="nats connection")

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    @property
    def malformed(self) -> int:
        """The number of unreadable messages so far, including those with an unreadable subject or header."""
        return self.unreadable.count

    async def wait_connected(self) -> None:
        """Wait until there is a connection."""
        while not self.connected:
            if self._keeper.done():
                self._keeper.result()
                raise BusDown("the bus is closed")
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def wait_closed(self) -> None:
        """Wait until the bus is closed. Raise whatever else has ended it, so that the process ends too."""
        await asyncio.wait((self._keeper,))
        if not self._keeper.cancelled():
            self._keeper.result()

    async def confirm(self, connections: int) -> None:
        client = self._client
        try:
            if client is not None and connections == self.connections:
                await sync(client)
        except FAILURES as wrong:
            raise BusDown(f"NATS: {wrong}") from wrong
        if client is None or client is not self._client or connections != self.connections:
            raise BusDown("the connection to NATS was lost")

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        no_responders: Callable[[], None] | None = None,
    ) -> None:
        client = self._check(payload)
        await self._send(
            client, subject, payload, headers, "" if no_responders is None else self._replies.probe(no_responders)
        )

    def publish_now(self, subject: str, payload: bytes) -> None:
        client = self._check(payload)
        subjects.check(subject)
        if client.pending_data_size > UNSENT_LIMIT_BYTES:
            raise BusDown(f"NATS has not received {client.pending_data_size} bytes")
        try:
            client.send(subject, payload, "")
        except FAILURES as wrong:
            raise as_headrace_error(wrong, client, subject, payload) from wrong

    async def subscribe(
        self,
        subject: str,
        receive: Receive,
        *,
        queue: str = "",
        pending_limit: int = 65536,
        dropped: Callable[[int], None] | None = None,
        overflowed: Callable[[Message], None] | None = None,
    ) -> NatsSubscription:
        """Subscribe. On return the server knows the subscription; while NATS is away, it will once it is back."""
        subjects.check(subject, wildcards=True)
        if self._closed:
            raise BusDown("the bus is closed")
        receiver = ReceiveQueue(
            subject,
            receive,
            pending_limit=pending_limit,
            dropped=dropped,
            overflowed=overflowed,
            unreadable=self.unreadable,
        )
        subscription = NatsSubscription(self, subject, queue, receiver)
        self._subscriptions.append(subscription)
        client = self._client
        if client is not None:
            try:
                await subscription.attach(client)
                await sync(client)
            except (*FAILURES, BusDown) as wrong:  # the next connection will carry it
                _log.debug("subscribing to %s: %r", subject, wrong)
        return subscription

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Message:
        client = self._check(payload)
        sending = partial(self._send, client, subject, payload, headers)
        return await self._replies.request(subject, timeout_s, sending)

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
        client = self._check(payload)
        stream = self._replies.stream(subject, pending_limit)
        remote: RemoteSubscription | None = None

        try:
            try:
                remote = await client.subscribe_direct(stream.inbox, stream.deliver)
            except FAILURES as wrong:
                raise as_headrace_error(wrong, client, stream.inbox, b"") from wrong
            await self._send(client, subject, payload, headers, stream.inbox)
            yield stream.messages(idle_timeout_s)
        finally:
            self._replies.close_stream(stream)
            if remote is not None and not client.is_closed:
                await unsubscribe_now(remote)

    async def drain(self) -> None:
        self._closed = True
        try:
            async with asyncio.TaskGroup() as tasks:
                for subscription in list(self._subscriptions):
                    tasks.create_task(subscription.unsubscribe())
        finally:
            await self._close()

    async def _close(self) -> None:
        while not self._keeper.done():  # nats-py may swallow a cancellation while it connects
            self._keeper.cancel()
            await asyncio.wait([self._keeper], timeout=WATCH_INTERVAL_S)
        client, self._client = self._client, None
        if client is not None and not client.is_closed:
            try:
                await sync(client)
                await client.close()
            except (*FAILURES, BusDown) as wrong:
                _log.warning("the messages published last may not have reached NATS: %r", wrong)
                abort(client)
        self._replies.fail(BusDown("the bus is closed"))

    def forget(self, subscription: NatsSubscription) -> None:
        """Forget a subscription that has ended."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def jetstream(self, limit_s: float) -> JetStreamContext:
        """Return nats-py's JetStream on the present connection; each answer may take `limit_s`. Raise BusDown."""
        return self._check(b"").jetstream(timeout=limit_s)

    # --- sending

    def _check(self, payload: bytes) -> DirectClient:
        client = self._client
        if client is None or not client.is_connected:
            raise BusDown(
                "the bus is closed" if self._closed else f"no connection to {without_password(self._config.url)}"
            )
        limit = min(self._config.payload_limit_bytes, client.max_payload)
        if len(payload) > limit:
            raise PayloadTooLarge(len(payload), limit)
        return client

    async def _send(
        self, client: DirectClient, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str
    ) -> None:
        subjects.check(subject)
        if client.pending_data_size > UNSENT_LIMIT_BYTES:
            await wait_sent(client, UNSENT_LIMIT_BYTES)
        try:
            if headers:
                await client.publish(subject, payload, reply=reply, headers=dict(headers))
            else:
                client.send(subject, payload, reply)
        except FAILURES as wrong:
            raise as_headrace_error(wrong, client, subject, payload) from wrong

    # --- the connection

    async def _keep_connected(self) -> None:
        rounds = 0
        while True:
            url = self._order.current
            client, wait_s = await self._connect(url), 0.0
            if client is not None:
                rounds, wait_s = 0, await self._use(client, url)
            elif self._order.failed():
                rounds += 1
                # Longer after each round, and never at the same moment as the other processes.
                wait_s = min(RETRY_WAIT_S * 2 ** min(rounds, 8) / 2, RETRY_LIMIT_S) * SystemRandom().uniform(0.5, 1.5)
                if not self.connections:
                    self._refused("; ".join(filter(None, self._refusals.values())))
            await asyncio.sleep(wait_s)

    async def _use(self, client: DirectClient, url: str) -> float:
        """Keep a connection until it is lost, or must be left. Return the pause after it in seconds."""
        shown, clock = without_password(url), asyncio.get_running_loop().time
        _log.info("connected to NATS at %s", shown)
        self._order.answered()
        began_s, leaves = clock(), False
        # Polled, because nats-py skips its closed callback if closing fails. So not all clients of a server that will
        # stop leave it at the same moment.
        while is_reading(client) and not leaves:
            await reading_ended(client, LOOK_AGAIN_S)
            leaves = client.lame_duck and self._order.several
        self._client = None
        if leaves:
            with suppress(*FAILURES, BusDown):
                await sync(client)
        abort(client)
        with suppress(*FAILURES):
            await client.close()  # a client that only stopped reading still has tasks
        self._replies.fail(BusDown("the connection to NATS was lost"))
        if leaves:
            _log.info("left NATS at %s, which will stop", shown)
        else:
            _log.warning("lost the connection to NATS at %s: %r", shown, client.last_error)
        self._order.lost()
        return 0.0 if self._order.several and clock() - began_s > SHORT_S else RETRY_WAIT_S

    async def _connect(self, url: str) -> DirectClient | None:
        """Return a connection to this server with every subscription on it, or None."""
        client = DirectClient()
        reason: Exception | None = None

        def failed(wrong: Exception) -> None:
            nonlocal reason
            reason = wrong
            if client.is_connected:
                self._report(wrong)

        try:
            await dial(client, self._config, url, self._name, failed, self._reads)
            await client.subscribe_direct(self._replies.prefix + "*", self._replies.deliver)
            while missing := [each for each in self._subscriptions if not each.is_on(client)]:
                for subscription in missing:
                    await subscription.attach(client)
                await sync(client)  # connected means that the server knows them all
            self._client = client
            self.connections += 1
        except (*FAILURES, BusDown, ConfigError) as wrong:
            self._complain(wrong if reason is None else reason, url)
        finally:
            if self._client is not client:
                abort(client)
                with suppress(*FAILURES, AssertionError):  # nats-py asserts that `connect` was called
                    await client.close()
        if self._client is not client:
            return None
        if client.max_payload < self._config.payload_limit_bytes:
            _log.warning("NATS's max_payload is %d bytes, below our payload limit", client.max_payload)
        return client

    def _report(self, wrong: Exception) -> None:
        """Log an error of a live connection: most often, the user may not publish or subscribe to a subject."""
        if isinstance(wrong, ProtocolError):
            self.unreadable.warn("unreadable message from NATS", wrong)
        elif not isinstance(wrong, nats.errors.UnexpectedEOF):  # that is logged when the connection has ended
            self._outages.error("NATS", wrong)

    def _complain(self, wrong: Exception, url: str) -> None:
        """Report that a connection could not be made: in the log every few seconds at most, for each server."""
        shown = without_password(url)
        refused = self._refusals[url] = refusal_text(wrong, self._config, url)
        if refused:
            self._outages.error(f"no connection to NATS at {shown}, tried again", refused)
        else:
            next_one = f"no connection to NATS at {shown}, the next server is tried"
            self._outages.warn(next_one if self._order.several else f"waiting for NATS at {shown}", repr(wrong))
