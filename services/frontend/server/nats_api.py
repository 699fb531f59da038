"""The NATS door: the same operations for programs that have only a NATS client.

    request   headrace.{ns}.frontend.chat        OpenAI's JSON body
    replies   one JSON object a message          a whole answer, or one chunk a message with `stream: true`
    last      header Headrace-Last: true         a failure also has Headrace-Status: its HTTP status

Where keys are asked for, the request shows its own in the header Authorization, as over HTTP, and the last message says
what is left of its limits. A request may name itself in X-Request-Id, and the last message does.

A client that vanishes is noticed by its inbox, as inbox_probe.py says; a stream that has nothing to say asks by
chunks without text. A request without `stream` has one message to send and nothing to ask with (its deadline ends it),
unless it carries the header Headrace-Probe: then empty messages may come before its answer. Those that cannot be asked
have a bound of their own (`limits.unasked`).

Requests come by a connection of their own (runtime.doors), answers leave by the services'. nats-server cuts off a
connection that does not take what clients send, and token streams come by the other one. What has come and waits here
is bounded; at the bound a request gets 429, unread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Struct

from services.frontend.auth.access import HEADER, Authenticator
from services.frontend.auth.accounts import Account
from services.frontend.metrics import Metrics
from services.frontend.protocol.errors import failure_of
from services.frontend.protocol.operations import OPERATIONS, Operation
from services.frontend.requests import deadline
from services.frontend.requests.service import Frontend
from services.frontend.server.inbox_probe import ClientGone, ClientInbox, ClientInboxes
from services.frontend.server.middleware import REQUEST_ID_HEADER
from services.frontend.server.routes import CLIENT_GONE
from services.frontend.serving.dispatch import Exchange
from services.frontend.serving.request_context import Asking, RequestId, request_id
from shared import subjects
from shared.bus.contract import LAST_HEADER, Message, Subscription
from shared.errors import BusDown, HeadraceError, InvalidRequest, Overloaded, ProtocolError, Unavailable
from shared.messages import JSON_HEADER
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.lifecycle import Runtime

STATUS_HEADER = "Headrace-Status"
PROBE_HEADER = "Headrace-Probe"
QUEUE = "frontend"
WAITING_LIMIT = 4096
"""Requests of one operation that have come and are not begun; shared/bus/receive_queue.py bounds their bytes too."""
ACTIVE_REFUSALS_LIMIT = 256
"""Answers at a time that too many wait; other requests over the bound get none."""
DEFAULT_INBOX_PREFIX = "_INBOX"
"""What clients' inboxes begin with by default."""
FAILURE_RETRY_S = 0.5
FAILURE_ATTEMPTS = 600
"""To tell a failure: a NATS that is away for five minutes loses none."""

_LAST = {**JSON_HEADER, LAST_HEADER: "true"}
_Receiver = Callable[[Message], Awaitable[None]]


class _NatsRequest(Struct, frozen=True):
    """One request."""

    message: Message
    named: RequestId
    account: Account | None
    """None: no key is asked for, or it has shown none."""

    def last(self) -> dict[str, str]:
        """The headers of the last message."""
        left = {} if self.account is None else self.account.rate_limit_headers(asyncio.get_running_loop().time())
        return {**_LAST, REQUEST_ID_HEADER: self.named.shown, **left}


class _Peek(Struct):
    """What is looked for in a body before it is decoded."""

    stream: bool | None = None


_peek = msgspec.json.Decoder(_Peek).decode


def _streams(body: bytes) -> bool:
    """Also where it cannot be read: it is refused at once."""
    try:
        return _peek(body).stream is True
    except (msgspec.DecodeError, RecursionError):
        return True


class NatsApi:
    """Answers on the clients' subjects."""

    def __init__(
        self,
        runtime: Runtime,
        exchange: Exchange,
        frontend: Frontend,
        metrics: Metrics,
        access: Authenticator,
        inbox: str = DEFAULT_INBOX_PREFIX,
    ) -> None:
        """`inbox` is what the inboxes of services begin with."""
        self._runtime = runtime
        self._exchange = exchange
        self._frontend = frontend
        self._metrics = metrics
        self._access = access
        self._doors = runtime.bus if runtime.doors is None else runtime.doors
        self._publish = runtime.bus.publish
        # Where services have no prefix of their own, clients' replies cannot be kept apart from theirs.
        self._ours = (f"{subjects.ROOT}.", *(() if inbox == DEFAULT_INBOX_PREFIX else (f"{inbox}.",)))
        self._limited_log = RateLimitedLog()
        self._refusals = 0
        self._inboxes = ClientInboxes(runtime.bus, metrics)
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Subscribe, one of the queue group."""
        self._runtime.tasks.create_task(self._inboxes.run(), name="ask whether NATS clients listen")

        receivers: dict[str, _Receiver] = {operation: self._receiver(operation) for operation in OPERATIONS}
        for operation, receive in (receivers | {"models": self._models}).items():
            subject = subjects.client(self._runtime.namespace, operation)
            self._subscriptions.append(
                await self._doors.subscribe(
                    subject, receive, queue=QUEUE, pending_limit=WAITING_LIMIT, over=self._refuse
                )
            )

    async def stop(self) -> None:
        """No new requests; those that run go on."""
        await asyncio.gather(*(subscription.unsubscribe() for subscription in self._subscriptions))

    def _receiver(self, operation: Operation) -> _Receiver:
        async def receive(message: Message) -> None:
            if (asked := await self._asked(message)) is not None:
                self._runtime.tasks.create_task(self._serve(operation, asked), name=f"nats {operation}")

        return receive

    async def _models(self, message: Message) -> None:
        if (asked := await self._asked(message)) is not None:
            await self._publish(message.reply, self._exchange.models(), headers=asked.last())

    async def _asked(self, message: Message) -> _NatsRequest | None:
        """None: it is not to be answered, or was, that its key is not good."""
        if not self._answerable(message):
            return None
        named = request_id(message.headers.get(REQUEST_ID_HEADER, ""))
        if not self._runtime.bus.connected:
            await self._fail(
                _NatsRequest(message, named, None), Unavailable("this frontend is cut off from workers"), tries=1
            )
            return None
        try:
            return _NatsRequest(message, named, self._access.authenticate(message.headers.get(HEADER)))
        except InvalidRequest as wrong:
            await self._fail(_NatsRequest(message, named, None), wrong, tries=1)  # once: strangers leave nothing behind
            return None

    def _answerable(self, message: Message) -> bool:
        """We may publish where a client may not: it must not make us say something to a service in its place."""
        if message.reply and not message.reply.startswith(self._ours):
            try:
                subjects.check(message.reply)  # nats-server lets a client name anything, `a..b` and `>` too
                return True
            except ProtocolError:
                pass
        self._metrics.unanswerable.inc()
        self._limited_log.warn(
            "a request over NATS has no inbox of a client as its reply subject",
            f"{message.reply!r}, on {message.subject}",
        )
        return False

    def _refuse(self, message: Message) -> None:
        """Too many wait: it is not read."""
        self._metrics.rejections.labels("nats_waiting").inc()
        if self._refusals < ACTIVE_REFUSALS_LIMIT:
            self._refusals += 1
            self._runtime.tasks.create_task(self._say_refused(message), name="nats refusal")

    async def _say_refused(self, message: Message) -> None:
        try:
            if self._answerable(message):
                why = Overloaded(f"{WAITING_LIMIT} requests on {message.subject} wait to be read")
                await self._fail(_NatsRequest(message, request_id(""), None), why, tries=1)
        finally:
            self._refusals -= 1

    async def _serve(self, operation: Operation, asked: _NatsRequest) -> None:
        status, message = CLIENT_GONE, asked.message
        try:
            async with self._inboxes.watch(message.reply) as inbox:
                status = await self._answer(operation, asked, inbox)
        except ClientGone:
            self._metrics.disconnected.inc()
        except BusDown as why:
            self._limited_log.warn("an answer over NATS is lost", f"{message.subject}: {why}")
            await self._fail(asked, Unavailable("NATS was away, and a part of the answer may be lost"))
        except asyncio.CancelledError:
            await self._fail(asked, Unavailable("this frontend has ended"), tries=1)
            raise
        finally:
            self._metrics.requests.labels(operation, str(status)).inc()

    async def _answer(self, operation: Operation, asked: _NatsRequest, inbox: ClientInbox) -> int:
        """The status it amounts to. Raises BusDown."""
        message = asked.message
        may_be_asked = PROBE_HEADER in message.headers
        if may_be_asked:
            inbox.keepalive = b""
        try:
            with self._frontend.admitted(len(message.payload), asked.account) as place:
                if not (may_be_asked or _streams(message.payload)):
                    place.unasked()
                begun = asyncio.get_running_loop().time()
                asking = Asking(asked.named, place, begun, message.headers.get(deadline.HEADER))
                async with self._exchange.answer(operation, message.payload, asking) as reply:
                    if not reply.streams:
                        await inbox.send(await reply.whole(), asked.last())
                        return 200
                    if inbox.keepalive is None:
                        inbox.keepalive = reply.nothing()
                    async for chunk in reply.chunks():
                        await inbox.send(chunk.payload, asked.last() if chunk.last else JSON_HEADER)
                    return 200
        except BusDown:
            raise
        except HeadraceError as error:
            return await self._fail(asked, error)

    async def _fail(self, asked: _NatsRequest, error: HeadraceError, tries: int = FAILURE_ATTEMPTS) -> int:
        """Its status. A client that listens is owed an end: it is told again and again, until NATS has it. What is told
        once goes by the clients' connection, which a stranger's failures may fill."""
        message, wrong = asked.message, failure_of(error)
        publish = self._publish if tries > 1 else self._doors.publish
        headers = {**asked.last(), STATUS_HEADER: str(wrong.status), **wrong.headers}
        for left in reversed(range(tries)):
            connections = self._runtime.bus.connections
            try:
                await publish(message.reply, wrong.payload, headers=headers)
                if tries > 1:
                    await self._runtime.bus.confirm(connections)  # a connection may be dead long before it breaks
                break
            except BusDown as why:
                if not left:
                    self._limited_log.warn("an answer over NATS is lost", f"{message.subject}: {why}")
                    break
            await asyncio.sleep(FAILURE_RETRY_S)
        return wrong.status
