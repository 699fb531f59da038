"""The API over NATS: the same operations as over HTTP, for programs that have only a NATS client.

    request   headrace.{ns}.frontend.chat        OpenAI's JSON body
    replies   one JSON object per message        the whole answer, or with `stream: true` one chunk per message
    last      header Headrace-Last: true         a failure also has Headrace-Status: its HTTP status

If API keys are required, the request carries its key in the header Authorization, as over HTTP, and the last message
has the key's rate limits. A request may bring its id in X-Request-Id; the last message always has it.

inbox_probe.py notices a client that vanishes; a stream probes its client with chunks that have no text. A request
without `stream` has nothing to probe with, so only its deadline ends it, unless it has the header Headrace-Probe: then
empty messages may come before its answer. `limits.unasked` bounds the requests that cannot be probed.

Requests come over a connection of their own (runtime.client_bus), and answers leave over the connection of the
services: nats-server cuts off a connection that does not read what clients send, and token streams come over the second
one. Requests that have come and wait here are bounded; at the bound a request gets 429 and is not read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.frontend.auth.access import HEADER, Authenticator
from services.frontend.auth.accounts import Account
from services.frontend.metrics import Metrics
from services.frontend.protocol.errors import failure_of
from services.frontend.protocol.operations import OPERATIONS, Operation
from services.frontend.requests.admission import Permit
from services.frontend.requests.request_trace import RequestTrace, begin_trace
from services.frontend.requests.service import RequestService
from services.frontend.server.access_log import note_end
from services.frontend.server.inbox_probe import ClientInbox, ClientInboxes, NoListener
from services.frontend.server.middleware import REQUEST_ID_HEADER
from services.frontend.server.routes import CLIENT_GONE
from services.frontend.serving.dispatch import Dispatcher
from services.frontend.serving.reply import Opening
from services.frontend.serving.request_context import RequestId, ignored_header, request_id
from shared import subjects
from shared.bus.contract import LAST_HEADER, Message, Subscription
from shared.errors import MALFORMED, BusDown, HeadraceError, InvalidRequest, Overloaded, ProtocolError, Unavailable
from shared.messages.codec import JSON_HEADER
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.runtime import Runtime
from shared.tracing.traceparent import of_client

STATUS_HEADER = "Headrace-Status"
PROBE_HEADER = "Headrace-Probe"
QUEUE = "frontend"
"""Name of the queue group that all frontends join, so that each request reaches one of them."""
WAITING_LIMIT = 4096
"""Requests of one operation that have come and wait to be read; shared/bus/receive_queue.py bounds their bytes too."""
ACTIVE_REFUSALS_LIMIT = 256
"""Requests over WAITING_LIMIT that are being answered with 429 at one time; further ones get no answer."""
RECONNECTION_S = 3.0
"""Seconds for which requests wait for the connection to the workers, from the first one of an outage that misses it."""
FLAPPING_S = 6.0
"""Seconds for which they wait in all, where one outage follows another: from the first request that missed the
connection, until for RECONNECTION_S none has."""
RECONNECTION_POLL_S = 0.02
"""Seconds between two looks at it."""
DEFAULT_INBOX_PREFIX = "_INBOX"
"""The prefix of inboxes that NATS clients use by default."""
FAILURE_RETRY_S = 0.5
"""Seconds between two attempts to send a failure."""
FAILURE_ATTEMPTS = 600
"""Attempts to send a failure, so that none is lost while NATS is unavailable for up to five minutes."""

_BAD_REPLY = "a request over NATS names no client's inbox as its reply subject"
_LOST = "an answer over NATS was lost"
_LAST = {**JSON_HEADER, LAST_HEADER: "true"}
_Receiver = Callable[[Message], Awaitable[None]]


class _NatsRequest(Struct):
    """A request as it came, with its id and account."""

    message: Message
    id: RequestId
    account: Account | None
    """None if no key is required, or the request has no valid one."""
    permit: Permit | None = None
    """What it has of the frontend's limits. None if it was refused."""
    trace: RequestTrace | None = None
    """None if the request is not traced."""

    def last_headers(self) -> dict[str, str]:
        """Return the headers of the answer's last message."""
        limits = {} if self.account is None else self.account.rate_limit_headers(asyncio.get_running_loop().time())
        trace = {} if self.trace is None else self.trace.headers
        return {**_LAST, REQUEST_ID_HEADER: self.id.shown, **limits, **trace}


class _Peek(Struct):
    """The field of a body that is read before the body is decoded."""

    stream: bool | None = None


_peek = msgspec.json.Decoder(_Peek).decode


def _streams(body: bytes) -> bool:
    """Return whether a body asks for a stream. True for a body that is no JSON, since that is refused at once."""
    try:
        return _peek(body).stream is True
    except MALFORMED:
        return True


class _Outages(Struct):
    """The outages of the connection to the workers, as requests find them."""

    connections: int = -1
    """How many connections there were before the latest outage."""
    found_s: float = 0.0
    """When a request found the latest outage."""
    first_s: float = 0.0
    """When a request found the first one of those that followed each other."""
    missed_s: float = -inf
    """When a request missed the connection the last time."""

    def allow_wait(self, connections: int, now_s: float) -> bool:
        """A request misses the connection, and there were `connections` before. Return whether it may wait on."""
        if now_s >= self.missed_s + RECONNECTION_S:
            self.first_s = now_s
        if connections != self.connections:
            self.connections, self.found_s = connections, now_s
        self.missed_s = now_s
        return now_s < min(self.found_s + RECONNECTION_S, self.first_s + FLAPPING_S)


class NatsApi:
    """Subscribes to the clients' subjects and answers their requests."""

    def __init__(
        self,
        runtime: Runtime,
        exchange: Dispatcher,
        frontend: RequestService,
        metrics: Metrics,
        access: Authenticator,
        inbox: str = DEFAULT_INBOX_PREFIX,
    ) -> None:
        """`inbox` is the prefix of the services' inboxes, to which no client may have answers sent."""
        self._runtime = runtime
        self._exchange = exchange
        self._frontend = frontend
        self._metrics = metrics
        self._access = access
        self._doors = runtime.bus if runtime.client_bus is None else runtime.client_bus
        self._publish = runtime.bus.publish
        # If the services use the default prefix, their inboxes cannot be distinguished from those of clients. What NATS
        # listens to itself, such as the subjects of JetStream, begins with `$`.
        self._service_prefixes = (f"{subjects.ROOT}.", "$", *(() if inbox == DEFAULT_INBOX_PREFIX else (f"{inbox}.",)))
        self._limited_log = RateLimitedLog()
        self._refusals = 0
        self._outages = _Outages()
        self._inboxes = ClientInboxes(runtime.bus, metrics)
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Subscribe to the subject of each operation, as a member of the queue group."""
        self._runtime.tasks.create_task(self._inboxes.run(), name="probe NATS clients")
        receivers: dict[str, _Receiver] = {operation: partial(self._receive, operation) for operation in OPERATIONS}
        for operation, receive in (receivers | {"models": self._models}).items():
            subject = subjects.client(self._runtime.namespace, operation)
            self._subscriptions.append(
                await self._doors.subscribe(
                    subject, receive, queue=QUEUE, pending_limit=WAITING_LIMIT, overflowed=self._refuse
                )
            )

    async def stop(self) -> None:
        """Unsubscribe: no new requests come, and those that run go on."""
        await asyncio.gather(*(subscription.unsubscribe() for subscription in self._subscriptions))

    async def _receive(self, operation: Operation, message: Message) -> None:
        if (request := await self._accept(message)) is not None:
            self._runtime.tasks.create_task(self._serve(operation, request), name=f"nats {operation}")

    async def _models(self, message: Message) -> None:
        if (request := await self._accept(message)) is not None:
            await self._publish(message.reply, self._exchange.models(), headers=request.last_headers())

    async def _accept(self, message: Message) -> _NatsRequest | None:
        """Check a request's reply subject and key. None if it has been refused, or must not be answered."""
        if not self._answerable(message):
            return None
        request = _NatsRequest(message, request_id(message.headers.get(REQUEST_ID_HEADER, "")), None)
        if not await self._has_workers():
            await self._fail(request, Unavailable("this frontend has lost its connection to the workers"), attempts=1)
            return None
        try:
            return replace(request, account=self._access.authenticate(message.headers.get(HEADER)))
        except InvalidRequest as wrong:
            await self._fail(request, wrong, attempts=1)  # a client without a key must not occupy memory for long
            return None

    async def _has_workers(self) -> bool:
        """Return whether the connection to the workers is there. When NATS comes back, that of the clients may be there
        sooner: wait for the other, but not again and again where it stays away."""
        loop, bus = asyncio.get_running_loop(), self._runtime.bus
        while not bus.connected:
            if not self._outages.allow_wait(bus.connections, loop.time()):
                return False
            await asyncio.sleep(RECONNECTION_POLL_S)
        return True

    def _answerable(self, message: Message) -> bool:
        """Check that the reply subject is a client's inbox. This frontend may publish where clients may not, so a
        client must not be able to make it send a message to a service."""
        if message.reply and not message.reply.startswith(self._service_prefixes):
            try:
                subjects.check(message.reply)  # nats-server lets a client name any subject, even `a..b` and `>`
                return True
            except ProtocolError:
                pass
        self._metrics.unanswerable.inc()
        self._limited_log.warn(_BAD_REPLY, f"{message.reply!r}, on {message.subject}")
        return False

    def _refuse(self, message: Message) -> None:
        """Refuse a request unread, as too many wait."""
        self._metrics.rejections.labels("nats_waiting").inc()
        if self._refusals < ACTIVE_REFUSALS_LIMIT:
            self._refusals += 1
            self._runtime.tasks.create_task(self._answer_refused(message), name="nats refusal")

    async def _answer_refused(self, message: Message) -> None:
        try:
            if self._answerable(message):
                why = Overloaded(f"{WAITING_LIMIT} requests on {message.subject} already wait to be read")
                await self._fail(_NatsRequest(message, request_id(""), None), why, attempts=1)
        finally:
            self._refusals -= 1

    async def _serve(self, operation: Operation, request: _NatsRequest) -> None:
        status, message, begun_s = CLIENT_GONE, request.message, time.perf_counter()
        request.trace = begin_trace(self._runtime.tracer, of_client(message.headers), operation)
        try:
            async with self._inboxes.watch(message.reply) as inbox:
                status = await self._answer(operation, request, inbox)
        except NoListener:
            self._metrics.disconnected.inc()
        except BusDown as why:
            self._limited_log.warn(_LOST, f"{message.subject}: {why}")
            lost = Unavailable("the connection to NATS was lost, and a part of the answer may be missing")
            status = await self._fail(request, lost)
        except asyncio.CancelledError:
            status = await self._fail(request, Unavailable("this frontend has shut down"), attempts=1)
            raise
        finally:
            ended = (request.id.unique, operation, status, time.perf_counter() - begun_s)
            note_end(self._metrics, *ended, request.permit, request.trace, log_every=self._exchange.access_log)

    async def _answer(self, operation: Operation, request: _NatsRequest, inbox: ClientInbox) -> int:
        """Send the answer or a failure; return its HTTP status. Raise BusDown."""
        message = request.message
        may_probe = PROBE_HEADER in message.headers
        if may_probe:
            inbox.keepalive = b""
        try:
            with self._frontend.admit(len(message.payload), request.account) as place:
                request.permit = place
                if not (may_probe or _streams(message.payload)):
                    place.count_unasked()

                def announced(opening: Opening) -> None:
                    if inbox.keepalive is None:
                        inbox.keepalive = opening.keepalive_chunk()

                context = self._exchange.context(request.id, place, message.headers, request.trace, announced)
                async with self._exchange.answer(operation, message.payload, context) as reply:
                    self._exchange.count_ignored(context.ignored.names)
                    ignored = ignored_header(context.ignored)
                    if isinstance(reply, bytes):
                        await inbox.send(reply, request.last_headers() | ignored)
                        return 200
                    if not may_probe:
                        inbox.keepalive = reply.keepalive_chunk()
                    async for chunk in reply.chunks():
                        headers = request.last_headers() | ignored if chunk.last else JSON_HEADER
                        await inbox.send(chunk.payload, headers)
                    return 200
        except BusDown:
            raise
        except HeadraceError as error:
            self._frontend.note_failure(request.id.unique, error)  # not of strangers: they could drive all others out
            return await self._fail(request, error)

    async def _fail(self, request: _NatsRequest, error: HeadraceError, attempts: int = FAILURE_ATTEMPTS) -> int:
        """Send a failure, if need be again and again until nats-server has it, since a client waits for an end. Return
        its HTTP status. With one attempt it leaves over the clients' connection, which failures of strangers may fill.
        """
        message, wrong = request.message, failure_of(error)
        publish = self._publish if attempts > 1 else self._doors.publish
        headers = {**request.last_headers(), STATUS_HEADER: str(wrong.status), **wrong.headers}
        for left in reversed(range(attempts)):
            connections = self._runtime.bus.connections
            try:
                await publish(message.reply, wrong.payload, headers=headers)
                if attempts > 1:
                    await self._runtime.bus.confirm(connections)  # a connection may be dead long before it breaks
                break
            except BusDown as why:
                if not left:
                    self._limited_log.warn(_LOST, f"{message.subject}: {why}")
                    break
            await asyncio.sleep(FAILURE_RETRY_S)
        return wrong.status
