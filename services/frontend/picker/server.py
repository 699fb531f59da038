"""The picker's port: the streams of gateways, one for each request, and gRPC's health protocol.

    gateway ─▶ read_message ─▶ Exchange ─▶ encode_reply ─▶ gateway
                                │    ▲
                 ChooseEndpoint ▼    │ EndpointsChosen, ChoiceRefused
             prompts.py, then picks.py

A stream is one task, which gRPC cancels when its gateway is gone. Whatever ends it frees its reservation.

    serve ── stop ─▶ leave: new streams are served too, and each ends as soon as its gateway can go on without it
                       └── none is open, but those whose answer's text passes through here ─▶ gRPC's GOAWAY ─▶ ended

gRPC refuses what comes after its GOAWAY, and closes a connection with its last stream. What a gateway has not read of
it by then may be lost. So streams end first: a gateway confirms the GOAWAY, and has read their ends by then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, assert_never

import grpc
import grpc.aio

from services.frontend.config import FrontendConfig
from services.frontend.picker.credentials import GatewayCredentials
from services.frontend.picker.exchange import BODY_LIMIT_BYTES, Exchange
from services.frontend.picker.health import GatewayHealth
from services.frontend.picker.messages import (
    REQUEST_ID,
    AnswerBegun,
    BodyReply,
    ChoiceRefused,
    ChooseEndpoint,
    EndpointsChosen,
    EndStream,
    ExchangeEvent,
    FirstText,
    GatewayBody,
    HeadersReply,
    ImmediateReply,
    PickerLeaves,
    ReleaseEndpoint,
    TimeOver,
    TrailersReply,
)
from services.frontend.picker.picks import EndpointPick, EndpointPicks
from services.frontend.picker.prompts import GatewayPrompts
from services.frontend.picker.wire import METHOD, encode_reply, read_message
from services.frontend.protocol.errors import failure_of
from services.frontend.requests.admission import Permit
from services.frontend.requests.terms import DEADLINE_HEADER, lowest_allowed
from services.frontend.server.access_log import note_end
from services.frontend.serving.chat import ServingChat
from services.frontend.serving.foreign import ServingForeign
from services.frontend.serving.request_context import (
    SALT_HEADER,
    SESSION_HEADER,
    RequestContext,
    header_salt,
    request_id,
    session_name,
)
from shared.errors import ConfigError, HeadraceError, Overloaded, ProtocolError
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.runtime import Runtime

RECEIVE_LIMIT_BYTES = 32 << 20
"""The most bytes of a gateway's message. If one is larger, its gateway learns only that the picker failed."""
HANDSHAKE_S = 10
"""Seconds for the handshake of TLS and of HTTP/2."""
PING_S = 30
"""Seconds between two pings to a silent gateway; one that does not answer for as long is gone."""
LEAST_PING_S = 5
"""The seconds between a gateway's pings that are looked at."""
GONE = 499
_DEADLINE, _SALT, _SESSION = (name.lower() for name in (DEADLINE_HEADER, SALT_HEADER, SESSION_HEADER))
WANTED = (":path", "content-type", REQUEST_ID, _DEADLINE, _SALT, _SESSION)
"""The headers that count."""

_log = logging.getLogger(__name__)


class PickerStream:
    """One stream of a gateway."""

    def __init__(self, picker: PickerPort, context: Any) -> None:
        self._picker = picker
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._exchange = Exchange(BODY_LIMIT_BYTES)
        self._reading: asyncio.Future[Any] | None = None
        self._leaving: asyncio.Future[None] = self._loop.create_future()
        self._until = self._loop.time() + picker.config.body_s
        """When TimeOver follows."""
        self._name = request_id()
        self._permit: Permit | None = None
        self._status = GONE
        self._begun_s = time.perf_counter()

    @property
    def passes_answer(self) -> bool:
        """Whether only the text of an answer, which goes through here, keeps it open."""
        return self._exchange.passes_answer

    def leave(self) -> None:
        """Make it end as soon as its gateway can go on without it."""
        if not self._leaving.done():
            self._leaving.set_result(None)

    async def run(self) -> None:
        """Answer until either side ends the stream."""
        picker = self._picker
        try:
            with picker.picks.begin() as pick:
                await self._admitted(pick)
        except ProtocolError as wrong:
            await self._fault(str(wrong))
        finally:
            if self._reading is not None:
                self._reading.cancel()
            ended = (self._name.unique, "pick", self._status, time.perf_counter() - self._begun_s)
            note_end(picker.metrics, *ended, self._permit, None, log_every=picker.log_every)

    async def _admitted(self, pick: EndpointPick) -> None:
        """Answer with what this process has room for."""
        streams = self._picker.config.streams
        async with AsyncExitStack() as held:
            try:
                if len(self._picker.streams) > streams:
                    raise Overloaded(f"picker.streams: {streams} open, no more are taken")
                self._permit = held.enter_context(self._picker.service.reserve())
            except HeadraceError as why:
                await self._follow(ChoiceRefused(failure_of(why), str(why)), pick)
                return
            while (event := await self._next()) is not None and await self._follow(event, pick):
                self._picker.note_progress()

    async def _next(self) -> ExchangeEvent | None:
        """Return what happens next. None if the gateway has ended the stream. Raise ProtocolError."""
        reading = self._reading = self._reading or asyncio.ensure_future(self._context.read())
        left_s = max(0.0, self._until - self._loop.time())
        done, _ = await asyncio.wait({reading, self._leaving}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if reading in done:
            payload, self._reading = reading.result(), None
            return read_message(payload, WANTED) if isinstance(payload, bytes) else None  # the end is an object
        if self._leaving in done:
            self._leaving = self._loop.create_future()
            return PickerLeaves()
        self._until = self._loop.time() + self._picker.config.body_s  # look again whether the answer has ended
        return TimeOver()

    async def _follow(self, event: ExchangeEvent, pick: EndpointPick) -> bool:
        """Do what follows from an event. Return whether the stream goes on."""
        if isinstance(event, GatewayBody) and event.phase == "request":
            event = self._counted(event)
        actions = deque(self._exchange.on(event))
        while actions:
            action = actions.popleft()
            match action:
                case HeadersReply() | BodyReply() | TrailersReply() | ImmediateReply():
                    if isinstance(action, ImmediateReply):
                        self._status = action.status
                    if not await self._write(encode_reply(action)):
                        return False
                case ChooseEndpoint():
                    actions.extend(self._exchange.on(await self._choose(action, pick)))
                case AnswerBegun():
                    self._status = 200
                    pick.begin(action.served, has_text=action.has_text)
                case FirstText():
                    pick.first_text()
                case ReleaseEndpoint():
                    pick.release()
                case EndStream():
                    if action.fault:
                        await self._fault(action.fault)
                    return False
                case _:
                    assert_never(action)
        if self._permit is not None and self._permit.admitted and not self._permit.tokenising:
            self._permit.forget_body()  # the gateway has it
        return True

    async def _write(self, reply: bytes) -> bool:
        """Send a reply. Return False if the gateway does not read."""
        try:
            async with asyncio.timeout(self._picker.config.body_s):
                await self._context.write(reply)
        except TimeoutError:
            return False
        return True

    def _counted(self, body: GatewayBody) -> ExchangeEvent:
        """Count a part of the body against the limits."""
        assert self._permit is not None
        try:
            self._permit.add_bytes(len(body.data))
        except HeadraceError as why:
            return self._refused(why)
        return body

    async def _choose(self, asked: ChooseEndpoint, pick: EndpointPick) -> ExchangeEvent:
        picker, headers = self._picker, asked.headers
        self._name = request_id(headers.get(REQUEST_ID, ""))
        begun = self._loop.time()
        assert self._permit is not None
        try:
            self._permit.admit()
            context = RequestContext(
                self._name,
                self._permit,
                begun,
                deadline_header=headers.get(_DEADLINE),
                session=session_name(headers.get(_SESSION)),
                salt_header=header_salt(headers.get(_SALT)),
                lowest_priority=lowest_allowed(None, picker.min_priority),
            )
            prompt = await picker.prompts.read(headers.get(":path", ""), asked.body, context)
            endpoints = await pick.choose(self._name, prompt, asked.subset)
        except HeadraceError as why:
            picker.service.note_failure(self._name.unique, why)
            return self._refused(why)
        self._until = prompt.deadline
        picker.metrics.picker_choice.labels("load" if prompt.unread else "prompt").observe(self._loop.time() - begun)
        if prompt.unread:
            text = f"its prompt was not read: {prompt.unread}"
            picker.runtime.notes.requests.add(self._name.unique, text, self._loop.time())
        return EndpointsChosen(endpoints, self._name.shown)

    def _refused(self, why: HeadraceError) -> ChoiceRefused:
        return ChoiceRefused(failure_of(why), str(why), self._name.shown)

    async def _fault(self, text: str) -> None:
        """End the stream with an error, because its gateway does not keep to the protocol."""
        self._status = 400
        self._picker.metrics.picker_faults.inc()
        self._picker.limited_log.warn("picker: a gateway broke the protocol", text)
        with suppress(grpc.aio.AbortError):
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)


class PickerPort:
    """The gRPC server, and what its streams share."""

    def __init__(self, runtime: Runtime, config: FrontendConfig, chat: ServingChat, foreign: ServingForeign) -> None:
        self.config, self.service, self.metrics = config.picker, chat.service, chat.metrics
        self.min_priority, self.log_every = config.access.min_priority, config.access_log
        self.runtime = runtime
        self.prompts = GatewayPrompts(chat, foreign)
        self.picks = EndpointPicks(runtime, chat.service, config.picker, chat.metrics)
        self.limited_log = RateLimitedLog()
        self.streams: set[PickerStream] = set()
        """The streams that are open."""
        self._leaving = False
        self._progress = asyncio.Event()
        """Set when a stream may have become one that is not waited for."""
        self.metrics.picker_streams.set_function(lambda: len(self.streams))
        options = {
            "grpc.max_receive_message_length": RECEIVE_LIMIT_BYTES,
            "grpc.so_reuseport": int(config.http.reuse_port),
            "grpc.server_handshake_timeout_ms": 1000 * HANDSHAKE_S,
            "grpc.keepalive_time_ms": 1000 * PING_S,
            "grpc.keepalive_timeout_ms": 1000 * PING_S,
            "grpc.keepalive_permit_without_calls": 1,
            "grpc.http2.min_ping_interval_without_data_ms": 1000 * LEAST_PING_S,
            "grpc.http2.max_ping_strikes": 0,  # a gateway may ping as often as it likes
        }
        self._server = grpc.aio.server(options=list(options.items()))
        _, service, method = METHOD.split("/")
        process = grpc.stream_stream_rpc_method_handler(self._process)
        streams = grpc.method_handlers_generic_handler(service, {method: process})
        self._health = GatewayHealth(self.faults)
        self._server.add_generic_rpc_handlers((streams, self._health.handler()))

    async def start(self) -> None:
        """Listen. Raise ConfigError if that fails."""
        config = self.config
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.port}"
        try:
            if config.tls_cert:
                files = GatewayCredentials(config, self.metrics)
                self._server.add_secure_port(address, await files.start(self.runtime.tasks))
            else:
                self._server.add_insecure_port(address)
        except RuntimeError as wrong:
            why = str(wrong).partition(";")[0]  # what follows is a variable of gRPC
            raise ConfigError(f"picker.port: {why}") from None
        await self._server.start()
        _log.info("the endpoint picker listens at %s%s", address, ", with TLS" if config.tls_cert else "")

    async def stop(self, limit_s: float) -> None:
        """Serve until a moment at which no gateway waits for a choice, then take no new streams, and end after
        `limit_s` those that are left."""
        until_s = asyncio.get_running_loop().time() + limit_s
        self._health.end()
        self._leaving = True
        for stream in list(self.streams):
            stream.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                while not all(stream.passes_answer for stream in self.streams):
                    self._progress.clear()
                    await self._progress.wait()
        await self._server.stop(max(0.0, until_s - asyncio.get_running_loop().time()))

    def note_progress(self) -> None:
        """Look whether the streams that are open are still waited for, if this port is about to end."""
        self._progress.set()

    async def _process(self, _: object, context: Any) -> None:
        stream = PickerStream(self, context)
        self.streams.add(stream)
        context.add_done_callback(partial(self._ended, stream))  # its status has been sent by then
        if self._leaving:
            stream.leave()
        await stream.run()

    def _ended(self, stream: PickerStream, _: object) -> None:
        self.streams.discard(stream)
        self.note_progress()

    def faults(self) -> Sequence[str]:
        """Return why no endpoint would be chosen; empty if one would."""
        has_endpoint = any(card.address for card in self.runtime.directory.cards.values())
        no_endpoint = [] if has_endpoint else ["no worker stands for a server: `headrace route` starts such workers"]
        return self.runtime.health.reasons or no_endpoint
