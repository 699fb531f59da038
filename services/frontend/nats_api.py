"""The NATS door: the same operations for programs that have only a NATS client.

    request   headrace.{ns}.frontend.chat        OpenAI's JSON body
    replies   one JSON object a message          a whole answer, or one chunk a message with `stream: true`
    last      header Headrace-Last: true         a failure also has Headrace-Status: its HTTP status

A client that vanishes is noticed by its inbox: about every PROBE_S of a stream a chunk asks for a sign that somebody
listens. (A request without `stream` sends nothing that could ask; its deadline ends it.)
"""

from __future__ import annotations

import asyncio
import logging

from services.frontend.error_object import failure_of
from services.frontend.exchange import Exchange, Operation, Reply, request_id
from services.frontend.http import CLIENT_GONE
from services.frontend.metrics import Metrics
from services.frontend.service import Frontend
from shared import subjects
from shared.errors import BusDown, HeadraceError, ProtocolError
from shared.lifecycle import Runtime
from shared.messages import JSON_HEADER
from shared.messaging import LAST_HEADER, Message, Subscription

STATUS_HEADER = "Headrace-Status"
QUEUE = "frontend"
PROBE_S = 1.0

_LAST = {**JSON_HEADER, LAST_HEADER: "true"}
_log = logging.getLogger(__name__)


class NatsDoor:
    """Answers on the clients' subjects."""

    def __init__(self, runtime: Runtime, exchange: Exchange, frontend: Frontend, metrics: Metrics) -> None:
        self._runtime = runtime
        self._exchange = exchange
        self._frontend = frontend
        self._metrics = metrics
        self._publish = runtime.bus.publish
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Subscribe, one of the queue group."""

        async def chat(message: Message) -> None:
            self._begin("chat", message)

        async def completions(message: Message) -> None:
            self._begin("completions", message)

        for operation, receive in (("chat", chat), ("completions", completions), ("models", self._models)):
            subject = subjects.client(self._runtime.namespace, operation)
            self._subscriptions.append(await self._runtime.bus.subscribe(subject, receive, queue=QUEUE))

    async def stop(self) -> None:
        """No new requests; those that run go on."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def _begin(self, operation: Operation, message: Message) -> None:
        if not self._answerable(message):
            return
        self._runtime.tasks.create_task(self._serve(operation, message), name=f"nats {operation}")

    async def _models(self, message: Message) -> None:
        if self._answerable(message):
            await self._publish(message.reply, self._exchange.models(), headers=_LAST)

    def _answerable(self, message: Message) -> bool:
        """We may publish where a client may not: it must not make us say something to a service in its place."""
        if message.reply and not message.reply.startswith(f"{subjects.ROOT}."):
            try:
                subjects.check(message.reply)  # nats-server lets a client name anything, `a..b` and `>` too
                return True
            except ProtocolError:
                pass
        self._metrics.unanswerable.inc()
        _log.warning("a request on %s has no inbox as its reply subject: %r", message.subject, message.reply)
        return False

    async def _serve(self, operation: Operation, message: Message) -> None:
        status = 200
        try:
            with self._frontend.admitted(len(message.payload)):
                async with self._exchange.answer(operation, message.payload, request_id()) as reply:
                    if reply.streams:
                        status = await self._stream(message.reply, reply)
                    else:
                        await self._publish(message.reply, await reply.whole(), headers=_LAST)
        except BusDown as why:
            status = CLIENT_GONE
            _log.warning("an answer on %s is lost: %s", message.subject, why)
        except HeadraceError as error:
            status = await self._fail(message, error)
        except asyncio.CancelledError:
            status = CLIENT_GONE
            raise
        finally:
            self._metrics.requests.labels(operation, str(status)).inc()

    async def _stream(self, to: str, reply: Reply) -> int:
        """The status it amounts to."""
        now = asyncio.get_running_loop().time
        gone = asyncio.Event()
        probe_at = now()
        async for chunk in reply.chunks():
            if gone.is_set():
                self._metrics.disconnected.inc()
                return CLIENT_GONE
            if chunk.last:
                await self._publish(to, chunk.payload, headers=_LAST)
            elif now() >= probe_at:
                probe_at = now() + PROBE_S
                await self._publish(to, chunk.payload, headers=JSON_HEADER, gone=gone.set)
            else:
                await self._publish(to, chunk.payload, headers=JSON_HEADER)
        return 200

    async def _fail(self, message: Message, error: HeadraceError) -> int:
        wrong = failure_of(error)
        headers = {**_LAST, STATUS_HEADER: str(wrong.status), **wrong.headers}
        try:
            await self._publish(message.reply, wrong.payload, headers=headers)
        except BusDown as why:
            _log.warning("a failure on %s is lost: %s", message.subject, why)
        return wrong.status
