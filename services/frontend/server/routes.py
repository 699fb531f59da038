"""The HTTP API: OpenAI's paths and two of vLLM's, on aiohttp, and clients that disconnect. server/port.py has the port.

A handler is cancelled when its client disconnects; that leaves `Exchange.answer` and so cancels the request. While the
client does not read, the handler waits in `ResponseBody.write`, and the text that comes is merged into fewer chunks.

An error before the first text is an HTTP status with OpenAI's error object, unless the text takes longer than half a
second: the headers are sent then, so that the client and proxies see an answer. A later error is an SSE event, and no
[DONE] follows it (server/answer_stream.py).

Every response has the request's id in X-Request-Id: the client's, if it is short and plain, or one of ours.
server/middleware.py checks keys and adds the headers that all answers have.
"""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler
from msgspec import Struct

from services.frontend.config import HttpConfig
from services.frontend.media.files import CONTENT_TYPES, MEDIA_PATH
from services.frontend.metrics import Metrics
from services.frontend.openapi import document
from services.frontend.openapi.operations import Version
from services.frontend.protocol.decoding import BODY_LIMIT_BYTES, body_too_large
from services.frontend.protocol.errors import failure, failure_of, field_error
from services.frontend.protocol.forms import FORM_FILES, form_as_json
from services.frontend.protocol.operations import (
    FOREIGN_PATHS,
    PATHS,
    STORED_METHODS,
    STORED_PATH,
    VIDEO_METHODS,
    VIDEO_PATH,
    WITHOUT_BODY,
    ForeignOperation,
    Operation,
)
from services.frontend.requests.admission import Permit
from services.frontend.requests.request_trace import RequestTrace
from services.frontend.requests.service import RequestService
from services.frontend.server.access_log import note_end
from services.frontend.server.answer_stream import AnswerStream
from services.frontend.server.middleware import (
    Middleware,
    account_of,
    begin_trace_of,
    error_response,
    request_id_of,
)
from services.frontend.server.port import Port
from services.frontend.server.sse import ResponseBody
from services.frontend.serving.dispatch import Dispatcher
from services.frontend.serving.foreign import EVENT_STREAM, foreign_error, last_event
from services.frontend.serving.request_context import RequestContext, ignored_header
from services.frontend.serving.text_proxy import AskedServers, TextProxy
from shared.errors import HeadraceError, InvalidRequest
from shared.tracing.tracer import Tracer
from shared.version import VERSION

_PERMIT = web.RequestKey("permit", Permit)
_JSON = "application/json"
FORM = "multipart/form-data"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PATH_OF: Mapping[Operation | ForeignOperation, str] = dict((*PATHS.items(), *FOREIGN_PATHS.items()))
CLIENT_GONE = 499
"""nginx's status for a client that disconnected before its answer. It is only counted in metrics, never sent."""


class HttpApi(Struct):
    """The aiohttp application and its handlers."""

    exchange: Dispatcher
    frontend: RequestService
    metrics: Metrics
    config: HttpConfig
    port: Port
    middleware: Middleware
    texts: TextProxy
    tracer: Tracer | None = None
    """None if tracing is off."""
    url: str = ""
    """The base URL where the application listens, set once it does."""
    page_url: str = ""
    """The base URL of the page at /ui, set once it is there. Empty if there is none."""

    def app(self, document_json: bytes) -> web.Application:
        """Make the application with all routes. `document_json` is the OpenAPI document that it serves."""
        app = self._bare_app(self.port, self.middleware)
        for operation, path in (*PATHS.items(), *FOREIGN_PATHS.items()):
            app.router.add_post(path, partial(self._counted, operation), expect_handler=_continue_later)
        for operation, method in STORED_METHODS.items():
            app.router.add_route(method, STORED_PATH, partial(self._counted, operation))
        for operation, (method, path) in VIDEO_METHODS.items():
            app.router.add_route(method, path, partial(self._counted, operation))
        app.router.add_get(f"{VIDEO_PATH}/content", self._video_file)

        for path, page in self.exchange.foreign.pages().items():
            app.router.add_get(path, partial(_page, page))
        app.router.add_get(document.PATH, partial(_respond, document_json))
        app.router.add_get("/version", partial(_respond, msgspec.json.encode(Version(VERSION))))
        app.router.add_get(f"{MEDIA_PATH}/{{name}}", self._media_file)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{model:.+}", self._one_model)
        return app

    def chat_app(self, port: Port, middleware: Middleware) -> web.Application:
        """Make an application for another port, whose only routes are those of chats and pictures."""
        app = self._bare_app(port, middleware)
        operations: tuple[Operation, ...] = ("chat", "pictures")
        for operation in operations:
            app.router.add_post(PATHS[operation], partial(self._counted, operation), expect_handler=_continue_later)
        return app

    def _bare_app(self, port: Port, middleware: Middleware) -> web.Application:
        middlewares = [port.track_request, _error_bodies, middleware.handle]
        app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=middlewares)
        app.on_response_prepare.append(port.add_connection_header)
        app.on_response_prepare.append(middleware.add_headers)
        return app

    async def _counted(self, operation: Operation | ForeignOperation, request: web.Request) -> web.StreamResponse:
        status = 500  # aiohttp's answer to an unexpected exception
        begun_s = time.perf_counter()
        trace = begin_trace_of(request, self.tracer, operation)
        try:
            response, status = await self._answer(operation, request, trace)
        except (asyncio.CancelledError, ConnectionError):
            status = CLIENT_GONE
            self.metrics.disconnected.inc()
            raise
        finally:
            ended = (request_id_of(request).unique, operation, status, time.perf_counter() - begun_s)
            note_end(self.metrics, *ended, request.get(_PERMIT), trace, log_every=self.exchange.access_log)
        return response

    async def _answer(
        self, operation: Operation | ForeignOperation, request: web.Request, trace: RequestTrace | None
    ) -> tuple[web.StreamResponse, int]:
        """Return the response and the status to count, which for a failed stream is the failure's."""
        stream = AnswerStream(request, unread_s=self.config.unread_s, silent_s=self.config.silent_s)
        try:
            with self.frontend.reserve(account_of(request)) as place:
                request[_PERMIT] = place
                sent = _path_and_query(request) if operation in WITHOUT_BODY else await self._body(request, place)
                if operation in FORM_FILES and request.content_type == FORM:
                    size, sent = len(sent), form_as_json(request.headers["Content-Type"], sent, FORM_FILES[operation])
                    place.add_bytes(max(0, len(sent) - size))
                place.admit()
                context = self.exchange.context(request_id_of(request), place, request.headers, trace, stream.open)
                if operation not in WITHOUT_BODY and (asked := self.texts.read(sent)) is not None:
                    passing = self._pass_on(asked, operation, sent, request, context)
                    del asked, sent  # they are dropped there once a server has answered
                    return await passing
                stream.headers = partial(ignored_header, context.ignored)
                answer = self.exchange.answer(operation, sent, context)
                del sent  # the operation drops it too once it has decoded it
                async with answer as reply:
                    self.exchange.count_ignored(context.ignored.names)
                    if isinstance(reply, bytes):
                        headers = {"Content-Type": _JSON, **ignored_header(context.ignored)}
                        body = ResponseBody(request, headers, unread_s=self.config.unread_s)
                        return await body.write_all(reply), 200
                    await stream.send(reply)
                    return await stream.end(), 200
        except HeadraceError as error:
            self.frontend.note_failure(request_id_of(request).unique, error)
            wrong = failure_of(error)
            return await stream.fail(wrong) or error_response(wrong), wrong.status
        finally:
            stream.close()

    async def _pass_on(
        self,
        asked: AskedServers,
        operation: Operation | ForeignOperation,
        sent: bytes,
        request: web.Request,
        context: RequestContext,
    ) -> tuple[web.StreamResponse, int]:
        """Have a server that takes text alone answer. Return the response and the status to count. Raise the error of
        an answer that has not begun."""
        async with self.texts.answer(asked, _PATH_OF[operation], sent, context) as reply:
            del asked, sent
            unread_s, status = self.config.unread_s, reply.status
            body = ResponseBody(request, reply.headers, unread_s=unread_s, framing="raw", status=status)
            try:
                await reply.pass_on(body)
            except HeadraceError as error:
                if not body.begun:
                    raise
                self.frontend.note_failure(request_id_of(request).unique, error)
                wrong = failure_of(error)
                event = last_event(request.path, reply.kind, wrong) if reply.lines.ends_line else None
                if event is not None and reply.kind == EVENT_STREAM and not reply.meter.ends_event:
                    event = b"\n\n" + event  # what came of the last one is not taken for a part of this
                return await body.break_off(event), wrong.status
            return await body.end(None), status

    async def _body(self, request: web.Request, place: Permit) -> bytes:
        if request.content_length is not None and request.content_length > BODY_LIMIT_BYTES:
            raise body_too_large(request.content_length)
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            raise InvalidRequest("Expect: only 100-continue is supported", status=417)
        if "Expect" in request.headers and request.version >= HttpVersion11 and request.transport is not None:
            request.transport.write(_CONTINUE)
        body = io.BytesIO()  # its value is no copy
        try:
            whole = request.content.is_eof()  # as most bodies are, and no time is limited then
            async with asyncio.timeout(None if whole else self.config.body_timeout_s):
                while piece := await request.content.readany():
                    if body.tell() + len(piece) > BODY_LIMIT_BYTES:
                        raise body_too_large(None)
                    place.add_bytes(len(piece))
                    body.write(piece)
            return body.getvalue()
        except web.RequestPayloadError as wrong:
            raise InvalidRequest(f"the body cannot be read: {wrong}") from None
        except TimeoutError:
            raise InvalidRequest("the body did not arrive in time", code="request_timeout", status=408) from None

    async def _media_file(self, request: web.Request) -> web.StreamResponse:
        """Send a file to the key that has made it."""
        return await self._file(self.exchange.media.find(request.match_info["name"], _key_of(request)))

    async def _video_file(self, request: web.Request) -> web.StreamResponse:
        """Send a complete video to the key that has made it."""
        if request.query.get("variant", "video") != "video":
            wrong = field_error("variant", "only video is there", "unsupported_value")
            return error_response(failure_of(wrong))
        return await self._file(self.exchange.videos.content(request.match_info["video_id"], _key_of(request)))

    async def _file(self, finding: Awaitable[Path]) -> web.StreamResponse:
        try:
            path = await finding
        except HeadraceError as error:
            return error_response(failure_of(error))
        headers = {"Content-Type": CONTENT_TYPES[path.suffix[1:]], "X-Content-Type-Options": "nosniff"}
        return web.FileResponse(path, headers=headers)

    async def _list_models(self, request: web.Request) -> web.Response:
        return await _respond(self.exchange.models(), request)

    async def _one_model(self, request: web.Request) -> web.Response:
        try:
            return await _respond(self.exchange.model(request.match_info["model"]), request)
        except HeadraceError as error:
            return error_response(failure_of(error))


def _key_of(request: web.Request) -> str:
    account = account_of(request)
    return "" if account is None else account.name


def _path_and_query(request: web.Request) -> bytes:
    """Return the parameters in the path and the query as a JSON body, as the operation has it over NATS."""
    return msgspec.json.encode({**request.query, **request.match_info})


async def _continue_later(_request: web.Request) -> None:
    """Keep aiohttp from answering `Expect` at once: the body is asked for only after the key has been checked and the
    request has a place."""


_POSTED = frozenset((*PATHS.values(), *FOREIGN_PATHS.values(), "/v1/models"))
_WITHOUT_V1 = frozenset(path.removeprefix("/v1") for path in ("/v1/models", *PATHS.values()) if path.startswith("/v1/"))
"""Paths that a client of OpenAI asks for whose base URL lacks /v1."""


def _hint(path: str) -> str:
    """Return what the error for a path that is not there says in addition."""
    if path in _WITHOUT_V1:
        return f"; it is at /v1{path}: the base URL ends in /v1"
    right = re.sub("/{2,}", "/", path).rstrip("/")
    if path.startswith("/v1/v1/"):
        right = right.removeprefix("/v1")
        why = "the base URL of this client ends without /v1"
    elif "//" in path:
        why = "one slash is enough; the base URL of this client may end with one too many"
    else:
        why = "no slash comes after it"
    return f"; it is at {right}: {why}" if right != path and right in _POSTED else ""


@web.middleware
async def _error_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn aiohttp's own refusals into OpenAI's error object, and all refusals on paths of another provider's API into
    that API's form."""
    try:
        response = await handler(request)
    except web.HTTPException as refusal:
        if refusal.status < 400:
            raise
        message = f"{request.method} {request.path}: {refusal.text or refusal.reason}"
        served = refusal.headers.get("Allow")
        if served is not None:
            message += f"; use {' or '.join(served.split(','))}"
        if refusal.status == 404:
            message += _hint(request.path)
        response = error_response(failure(refusal.status, message, "invalid_request_error"))
        if served is not None:
            response.headers["Allow"] = served
    if response.status >= 400 and isinstance(response, web.Response) and isinstance(response.body, bytes):
        response.body = foreign_error(request.path, response.status, response.body)
    return response


async def _page(content: Callable[[], bytes | str], request: web.Request) -> web.Response:
    page = content()
    return web.Response(text=page) if isinstance(page, str) else await _respond(page, request)


async def _respond(payload: bytes, _request: web.Request) -> web.Response:
    return web.Response(body=payload, content_type=_JSON)
