"""Passes requests on to servers that take and give text alone, and their answers back as they are.

    body ─▶ text_body.py: the prompt's blocks ─▶ routers: reserved ─▶ text_servers.py ─▶ the answer's headers
                                     ▲                                    │ none, or busy     │
                                     └──────── text_tries.py ◀────────────┘                   ▼
    client ◀── each part as it comes: at most one that it has not read ◀──────────────── pass_on

Frontends send to servers themselves: through the worker and NATS each byte would be copied four times more. The router
knows no difference. Blocks are hashes of text, and reports of workers do not have these attempts, so that each is
reserved, and ends with Finished. After the first byte nothing can go on elsewhere, since nothing here knows what the
server's tokens are.

A server is not read while the client does not read. An answer that is silent for `text.idle_s` ends, and so does one at
its deadline. Whatever ends a request closes its connection, by which its server hears of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

import aiohttp
import msgspec
from msgspec import Struct

from services.frontend.auth.accounts import TokenUse
from services.frontend.config import FrontendConfig
from services.frontend.metrics import Metrics
from services.frontend.models.registry import ModelRegistry
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.text_body import (
    AnswerMeter,
    Fields,
    TextBody,
    TextUsage,
    WholeLines,
    known_fields,
    read_fields,
    read_model,
    read_text,
)
from services.frontend.requests.calls import refusal_of
from services.frontend.requests.service import RequestService
from services.frontend.requests.terms import RequestDeadline, deadline_of, served_priority
from services.frontend.requests.unreported import UnreportedAttempts
from services.frontend.requests.way import WayCounts, WayLog
from services.frontend.serving.foreign import EVENT_STREAM, STREAMS
from services.frontend.serving.request_context import SALT_HEADER, RequestContext
from services.frontend.serving.text_servers import TextAnswer, TextServers, broken, passed_headers
from services.frontend.serving.text_suspects import HANGS_S, ServerSuspects
from services.frontend.serving.text_tries import TextFault, TextTries, fault_of
from shared.errors import HeadraceError, InvalidRequest, RequestTimeout, Unavailable
from shared.hashing import seed_of
from shared.messages.cards import ModelCard
from shared.messages.select import Select, Selected, SelectRefused
from shared.runtime.runtime import Runtime

OK = 200
WITHOUT_TEXT = ("/embeddings", "/embed", "/tokenize", "/detokenize", "/show", "/count_tokens")
"""The ends of the paths whose answers are no text that was generated."""


class TextSink(Protocol):
    """What an answer is passed to: a ResponseBody. Its methods raise ConnectionError."""

    def try_send(self, payload: bytes) -> bool:
        """Send a part, unless the client has not read the one before."""
        ...

    async def write(self, payload: bytes) -> None:
        """Send a part as soon as the client reads; the first one with the headers."""
        ...


class AskedServers(Struct, frozen=True):
    """What a body asks servers for that take text alone."""

    model: str
    fields: Fields


class TextProxy:
    """All requests of this process that pass through."""

    def __init__(
        self, runtime: Runtime, service: RequestService, models: ModelRegistry, metrics: Metrics, config: FrontendConfig
    ) -> None:
        """Raise ConfigError for the files of the key and of TLS."""
        self.runtime, self.service, self.metrics, self.config = runtime, service, metrics, config.text
        self.servers = TextServers(config.text, 2 * config.limits.requests)  # with one that is kept while it is busy
        self.suspects = ServerSuspects()
        self._models = models

    async def aclose(self) -> None:
        """Close all connections."""
        await self.servers.aclose()

    def read(self, body: bytes) -> AskedServers | None:
        """Return which model a body asks for, if its servers take text alone. None if they do not. Raise InvalidRequest
        if it is no JSON object, or too large."""
        if not self._models.texts:
            return None
        try:
            fields = read_fields(body)
        except InvalidRequest:
            if self._models.text_of(None):
                raise
            return None  # what another model's operation says of it
        model = self._models.text_of(read_model(fields))
        return AskedServers(model, known_fields(fields)) if model else None

    @asynccontextmanager
    async def answer(
        self, servers: AskedServers, path: str, body: bytes, context: RequestContext
    ) -> AsyncIterator[TextReply]:
        """Yield the answer of a server that has begun it. Leaving the context ends the request, and notes what
        it cost its key. Raise InvalidRequest, Overloaded, RateLimited, Unavailable and RequestTimeout."""
        permit, limits, model = context.permit, self.service.limits, servers.model
        permit.model = model
        deadline = deadline_of(None, context.deadline_header, context.received_s, limits)
        asked = read_text(servers.fields)
        del servers  # its fields hold the body
        self._check_salt(context)
        cards = [card for card in self.runtime.directory.cards.values() if card.model == model]
        # As far as it is known, an answer is no longer than the context.
        most = asked.choices * max((card.context_length for card in cards), default=0)
        charged = asked.prompt_tokens + min(asked.max_tokens, most)
        permit.add_tokens(charged)
        permit.charge(charged, asyncio.get_running_loop().time())
        if context.trace is not None:
            context.trace.attributes["gen_ai.request.model"] = model
        block_units = cards[0].block_size if cards else 0
        reply = TextReply(self, model, path, asked, block_units, context, deadline)
        del asked  # its text is only needed for hashes
        error: HeadraceError | None = None
        try:
            await reply.begin(path, body)
            del body  # up to a few megabytes, which the answer does not need
            permit.forget_body()
            yield reply
        except HeadraceError as wrong:
            error = wrong
            raise
        finally:
            permit.spent = reply.close(charged, error)

    def _check_salt(self, context: RequestContext) -> None:
        """Raise InvalidRequest if a request is to have a cache of its own, which a server's is not. A `cache_salt` in
        the body passes: the server sees it."""
        account = context.permit.account
        of_key = account is not None and account.entry.salt is not None
        if (of_key or context.salt_header) and not self.config.ignore_salts:
            what = "the API key" if of_key else SALT_HEADER
            wrong = "asks for cached blocks of its own, and the servers of this model share theirs"
            raise field_error("model", f"{what} {wrong}; text.ignore_salts serves it", "unsupported_value", 403)


class TextReply:
    """One request, and the answer to it that passes. Times are seconds on the loop's clock."""

    def __init__(
        self,
        proxy: TextProxy,
        model: str,
        path: str,
        asked: TextBody,
        block_units: int,
        context: RequestContext,
        deadline: RequestDeadline,
    ) -> None:
        """`block_units` is the size of the model's blocks; 0 if no server is there."""
        self.status = 0
        """The status of the answer. 0 before it has come."""
        self.headers: Mapping[str, str] = {}
        self.kind = ""
        """The type of the answer's content. Empty if it is compressed."""
        self.meter, self.lines = AnswerMeter(streamed=False), WholeLines()
        self._proxy, self._model, self._path, self._context = proxy, model, path, context
        seed = seed_of(salt=context.salt(asked.salt))
        select = Select(
            request=context.id.unique,
            attempt=0,
            frontend=proxy.runtime.instance,
            model=model,
            hashes=asked.hashes(block_units, seed) if block_units else b"",
            prompt_tokens=asked.prompt_tokens,
            max_tokens=max(1, asked.max_tokens),
            priority=served_priority(None, context.lowest_priority),
            session=context.session or asked.session,
        )
        self._attempts = UnreportedAttempts(proxy.service, select, deadline.at)
        self._asked = msgspec.structs.replace(asked, prompt=b"")
        self._deadline = deadline
        self._now = asyncio.get_running_loop().time
        self._answer: TextAnswer | None = None
        self._instance = ""
        self._sent_s = 0.0
        """When the request was sent to the latest server."""
        self._moved = False
        """Whether a part has come since `_look` has looked."""
        self._held = False
        """Whether the client is waited for, and not the server."""
        self._silent = False
        """Whether the answer was ended since its server was silent."""
        self._timer: asyncio.TimerHandle | None = None
        """The timer that calls `_look`."""
        self._outcome = "cancelled"
        """What ended it, as `RequestWay.outcome` says."""
        self._usage: TextUsage | None = None
        """The tokens of the answer. None before its end."""
        begun = (context.id.unique, model, asked.prompt_tokens, self._counts, context.received_s, self._now())
        self._ways = proxy.service.ways or WayLog(0)  # which keeps none, as there is no page
        self._way = self._ways.begin(*begun, passes=True)

    async def begin(self, path: str, body: bytes) -> None:
        """Find a server that answers. Raise as `TextProxy.answer`."""
        proxy, limits = self._proxy, self._proxy.service.limits
        tries, instance = TextTries(limits.attempts), ""
        streams = self._asked.stream if self._asked.stream is not None else path.startswith("/api/")
        # An answer that comes whole begins when it ends.
        first_s = self._context.received_s + limits.first_token_s if streams else self._deadline.at
        try:
            async with asyncio.timeout_at(min(self._deadline.at, first_s)):
                while (card := await self._choose(tries)) is not None:
                    tries.begin()
                    self._sent_s, instance = self._now(), card.instance
                    answer = await proxy.servers.send(card, path, body, self._context.id.unique)
                    if isinstance(answer, TextFault):
                        fault: TextFault | None = answer
                    else:
                        fault = fault_of(answer.response.status, answer.response.content_type)
                        self._keep(answer, instance, passes=fault is None or fault.passes)
                    self._judge(instance, fault)
                    if fault is None:
                        self._attempts.forget_hashes()
                        self._way.accept(self._now())
                        return
                    self._lose(instance, fault)
                    if not tries.failed(instance, fault):
                        break
                    instance = ""
        except (TimeoutError, asyncio.CancelledError) as end:
            if instance and streams and self._now() - self._sent_s > HANGS_S:
                proxy.suspects.fault(instance, self._now())
            if not isinstance(end, TimeoutError):
                raise
            if not self.status or self._now() >= self._deadline.at:
                why = "the request's deadline passed, or limits.first_token_s, before a server answered"
                raise RequestTimeout(tries.text(why)) from None
        if not self.status:
            raise Unavailable(tries.text("no server answers"))

    async def _choose(self, tries: TextTries) -> ModelCard | None:
        """Have a router reserve the next attempt. Return the card of the server; None if no other is there. Raise the
        router's refusal if none was tried."""
        attempts, first = self._attempts, not self._attempts.latest
        suspects = self._proxy.suspects.passed_over(self._now())
        while True:
            answer = await attempts.select((*tries.excluded, *suspects), waits=first)
            if isinstance(answer, Selected):
                card = self._proxy.runtime.directory.cards.get((self._model, answer.instance))
                if card is not None and card.server:
                    self._way.choose(attempts.latest, card.instance, self._now())
                    return card
                tries.excluded[answer.instance] = None  # this process does not know it yet
                attempts.finish()
            elif (
                isinstance(answer, SelectRefused) and answer.code == "all_excluded" and (suspects or tries.none_left())
            ):
                suspects = []
            elif not self._sent_s:
                raise refusal_of(answer)
            else:
                return None

    def _keep(self, answer: TextAnswer, instance: str, *, passes: bool) -> None:
        """Take an answer, in place of one that is kept; drop it if it does not pass."""
        response = answer.response
        if not passes:
            response.close()
            return
        if self._answer is not None:
            self._answer.response.close()
        self._answer, self._instance = answer, instance
        self.status, self.headers = response.status, passed_headers(response)
        self.kind = "" if "Content-Encoding" in self.headers else response.content_type
        self.meter = AnswerMeter(streamed=self.kind == EVENT_STREAM)

    def _judge(self, instance: str, fault: TextFault | None) -> None:
        """Note whether a server answered. One that is busy did, and one that fails did not."""
        failed = self.status >= 500 if fault is None else fault.counts
        if failed:
            self._proxy.suspects.fault(instance, self._now())
        else:
            self._proxy.suspects.answered(instance)

    def _lose(self, instance: str, fault: TextFault) -> None:
        self._proxy.metrics.lost.labels(fault.loss).inc()
        self._note(f"{instance} {fault.why}")
        self._attempts.finish()

    def _note(self, text: str) -> None:
        notes, attempt = self._proxy.runtime.notes.requests, self._attempts.latest
        notes.add(self._context.id.unique, text, self._now(), attempt=attempt)

    async def pass_on(self, sink: TextSink) -> None:
        """Pass the answer to its end. Raise Unavailable or RequestTimeout if it breaks off, ConnectionError if the
        client has left or does not read."""
        assert self._answer is not None
        send, part, lines = sink.try_send, self._answer.first, self.kind in STREAMS
        self._timer = asyncio.get_running_loop().call_later(self._proxy.config.idle_s, self._look)
        try:
            async with asyncio.timeout_at(self._deadline.at):
                if part:
                    self._begun()
                while part:
                    self._moved = True
                    passes = self.lines.take(part) if lines else part
                    if passes:
                        begun = self.meter.size_bytes
                        self.meter.add(passes)  # before it is sent: a client that takes it and leaves pays for it
                        if not (begun and send(passes)):
                            await self._write(sink, passes)
                    part = await self._read()
                if self.lines.held:
                    self.meter.add(self.lines.held)
                    await self._write(sink, self.lines.held)
            self._outcome = "answered" if self.status == OK else str(self.status)
        except TimeoutError:
            self._proxy.metrics.lost.labels("stalled").inc()
            raise self._broken(RequestTimeout("the request's deadline passed before its answer ended")) from None
        finally:
            self._timer.cancel()  # the latest one: `_look` replaces it

    async def _read(self) -> bytes:
        """Return the next part of the answer; empty at its end. Raise Unavailable."""
        assert self._answer is not None
        try:
            return await self._answer.response.content.readany()
        except (aiohttp.ClientError, OSError) as wrong:
            why = f"sent nothing for {self._proxy.config.idle_s:g} s" if self._silent else broken(wrong)
            self._proxy.metrics.lost.labels("stalled" if self._silent else "gone").inc()
            self._note(f"{self._instance} {why}")
            said = f"the server {why}, and an answer that has begun cannot go on elsewhere"
            raise self._broken(Unavailable(said)) from None

    def _broken(self, error: HeadraceError) -> HeadraceError:
        """Return the error by which an answer ends that has begun."""
        self._outcome = type(error).__name__
        return error

    async def _write(self, sink: TextSink, part: bytes) -> None:
        self._held = True
        await sink.write(part)
        self._held = False

    def _look(self) -> None:
        """End the answer if its server was silent since the last look."""
        assert self._answer is not None
        if self._moved or self._held:
            self._moved = False
            self._timer = asyncio.get_running_loop().call_later(self._proxy.config.idle_s, self._look)
        else:
            self._silent = True
            self._answer.response.close()

    def _begun(self) -> None:
        """Note the first part of an answer."""
        if self.status != OK:
            return
        now, received_s, metrics = self._now(), self._context.received_s, self._proxy.metrics
        took_s = now - received_s
        metrics.of_model(self._model).first_token.observe(took_s)
        metrics.hops["first_token"].observe(now - self._sent_s)
        self._context.permit.served.begun(took_s)
        self._attempts.mark_prefilled(self._instance, took_s)
        self._way.begin_output(now)

    def close(self, charged: int, error: HeadraceError | None) -> TokenUse:
        """End the request, and return what its key pays for."""
        self._attempts.finish()
        if self._answer is not None:
            self._answer.response.close()  # a connection whose answer has ended is free already
        spent = self._spent(charged, error)
        self._ways.end_passing(self._way, self._outcome if error is None else type(error).__name__, self._now())
        return spent

    def _counts(self) -> WayCounts:
        """Return what the page shows: at the end what the answer says of its tokens, before it its events."""
        usage = self._usage
        return (self.meter.events, (0, 0, 0)) if usage is None else (usage.output_tokens, (usage.cached_tokens, 0, 0))

    def _spent(self, charged: int, error: HeadraceError | None) -> TokenUse:
        """Count the tokens of an answer that has ended, and return what its key pays for: nothing without an answer,
        unless its client has left or asked for less time. Then it pays for the prompt."""
        if self.status != OK or not self.meter.size_bytes:
            late = self._deadline.shortened and isinstance(error, RequestTimeout)
            left = error is None and self.status in (0, OK)
            return TokenUse(charged, self._asked.prompt_tokens if late or left else 0)
        generates = not self._path.endswith(WITHOUT_TEXT)
        usage = self._usage = self.meter.usage(self._asked.prompt_tokens, generates=generates)
        self._way.prompt_tokens = usage.prompt_tokens
        permit = self._context.permit
        permit.served.add(
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            instance=self._instance,
            attempts=self._attempts.latest,
        )
        metrics = self._proxy.metrics.of_model(self._model)
        metrics.input_tokens.observe(usage.prompt_tokens)
        metrics.prompt_count.inc(usage.prompt_tokens)
        metrics.output_tokens.observe(usage.output_tokens)
        metrics.output_count.inc(usage.output_tokens)
        metrics.cached[0].inc(usage.cached_tokens)
        return TokenUse(charged, usage.prompt_tokens, usage.output_tokens)


def _is_none_left(answer: object) -> bool:
    """Return whether a router says that each server is excluded."""
    return isinstance(answer, SelectRefused) and answer.code == "all_excluded"
