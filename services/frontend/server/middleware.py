"""Checks and headers that all HTTP requests have in common: preflights, API keys, request ids.

no HTTP version in the first line               ──▶  400
a malformed anthropic-version, on its paths     ──▶  400
two headers X-Cache-Salt                        ──▶  400
a body with a Content-Encoding                  ──▶  415, the body is not read
OPTIONS with Origin, if origins are set         ──▶  204 or 403, no key needed
a page of another site, if no keys are set      ──▶  403 (shared/runtime/origin.py)
a path that is not keyless, if keys are set     ──▶  400 for two keys, 401 before the body is read, or the account of
                                                     the request
every answer                                    ──▶  X-Request-Id, traceparent if it is traced, the key's rate limits,
                                                     `no-store` and `nosniff`;
                                                     no Server header
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from aiohttp import HttpVersion10, web
from aiohttp.typedefs import Handler

from services.frontend.auth.access import HEADER, Authenticator
from services.frontend.auth.accounts import Account
from services.frontend.config import HttpConfig
from services.frontend.protocol.errors import Failure, failure, failure_of, field_error
from services.frontend.protocol.operations import FOREIGN_PATHS
from services.frontend.requests.request_trace import RequestTrace, begin_trace
from services.frontend.server.cors import NOT_ALLOWED, Cors
from services.frontend.serving.request_context import SALT_HEADER, RequestId, request_id
from shared.errors import InvalidRequest
from shared.runtime.origin import rule_of
from shared.tracing.traceparent import HEADER as TRACEPARENT_HEADER
from shared.tracing.tracer import Tracer

REQUEST_ID_HEADER = "X-Request-Id"
ENCODING_HEADER = "Content-Encoding"
ANTHROPIC_PATHS = frozenset({FOREIGN_PATHS["messages"], FOREIGN_PATHS["count_tokens"]})
"""Paths whose answers name the request in Anthropic's header too."""
ANTHROPIC_KEY_HEADER = "X-Api-Key"
"""The header that carries the key for Anthropic's clients: the key alone."""
VERSION_HEADER = "anthropic-version"
"""The header with the version of Anthropic's API. There is one, so it changes nothing."""
_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
KEYLESS_PATHS = frozenset({"/live", "/health"})
"""Paths that need no API key, since a load balancer has none."""
_REQUEST_ID = web.RequestKey("named", RequestId)
_ACCOUNT = web.RequestKey("account", Account)
_TRACE = web.RequestKey("trace", RequestTrace)
_OPTIONS = 204


class Middleware:
    """The middleware of one HTTP server. It must be the innermost, just before the handlers."""

    def __init__(
        self, access: Authenticator, config: HttpConfig, keyless: Iterable[str] = (), hosts: Iterable[str] = ()
    ) -> None:
        """`keyless` are paths that need no key, in addition to KEYLESS_PATHS; `hosts` are names that the port has
        in addition to those of `config`."""
        self._access = access
        self._keyless = KEYLESS_PATHS.union(keyless)
        self._cors = Cors(config.cors_origins)
        self._rule = rule_of("http", config.host, {*config.hosts, *hosts}, config.cors_origins)

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Pass the request on to its handler, or refuse it."""
        if (malformed := _malformed(request)) is not None:
            return error_response(failure_of(malformed))
        if self._cors.is_preflight(request.method, request.headers):
            allowed = self._cors.preflight_headers(request.headers)
            if isinstance(allowed, Failure):
                return error_response(allowed)
            return web.Response(status=_OPTIONS, headers=allowed)
        if not self._access.requires_key:
            linkable = request.method in ("GET", "HEAD")
            if request.method != "OPTIONS" and (why := self._rule.refusal(request.headers, linkable=linkable)):
                return error_response(failure(403, why, "invalid_request_error", code=NOT_ALLOWED))
        elif request.path not in self._keyless:
            try:
                account = self._access.authenticate(_authorization(request))
            except InvalidRequest as wrong:
                return error_response(failure_of(wrong))
            if account is not None:
                request[_ACCOUNT] = account
        return await handler(request)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that every response has; an aiohttp `on_response_prepare` signal."""
        headers = response.headers
        headers[REQUEST_ID_HEADER] = request_id_of(request).shown
        if request.path in ANTHROPIC_PATHS:
            headers["Request-Id"] = headers[REQUEST_ID_HEADER]
        headers["X-Content-Type-Options"] = "nosniff"
        headers["Cache-Control"] = "no-store"
        headers.pop("Server", None)
        headers.update(self._cors.answer_headers(request.headers.get("Origin")))
        if (trace := request.get(_TRACE)) is not None:
            headers.update(trace.headers)
        if (account := account_of(request)) is not None:
            headers.update(account.rate_limit_headers(asyncio.get_running_loop().time()))


def _authorization(request: web.Request) -> str | None:
    """Return the request's key as the header `Authorization` has it. Raise InvalidRequest if there are several."""
    given = request.headers.getall(HEADER, [])
    keys = {*given, *(f"Bearer {key}" for key in request.headers.getall(ANTHROPIC_KEY_HEADER, ()))}
    if len(given) > 1 or len(keys) > 1:
        raise field_error(HEADER, f"the request has more than one key, here or in {ANTHROPIC_KEY_HEADER}; send one")
    return next(iter(keys), None)


def _malformed(request: web.Request) -> InvalidRequest | None:
    """Return what makes the request unacceptable on any path."""
    if request.version < HttpVersion10:
        return InvalidRequest("the request's first line names no HTTP version; send HTTP/1.0 or HTTP/1.1")
    versions = request.headers.getall(VERSION_HEADER, ()) if request.path in ANTHROPIC_PATHS else ()
    if len(versions) > 1 or not all(map(_VERSION.fullmatch, versions)):
        return field_error(VERSION_HEADER, "no version of Anthropic's API; send one date, such as 2023-06-01, or none")
    if len(request.headers.getall(SALT_HEADER, ())) > 1:
        return field_error(SALT_HEADER, "the request has it twice; send it once")
    codings = ",".join(request.headers.getall(ENCODING_HEADER, ())).lower()
    if codings and request.body_exists and {coding.strip() for coding in codings.split(",")} - {"", "identity"}:
        return field_error(ENCODING_HEADER, "encoded bodies are not supported; send the body uncompressed", status=415)
    return None


def account_of(request: web.Request) -> Account | None:
    """Return the account whose key the request carries; None if no key is required."""
    return request.get(_ACCOUNT)


def request_id_of(request: web.Request) -> RequestId:
    """Return the request's id, the same at each call: the client's, if it is usable, or a new one."""
    if (named := request.get(_REQUEST_ID)) is None:
        named = request[_REQUEST_ID] = request_id(request.headers.get(REQUEST_ID_HEADER, ""))
    return named


def begin_trace_of(request: web.Request, tracer: Tracer | None, operation: str) -> RequestTrace | None:
    """Return the trace of a request that has just come, whose answer names it; None if it is not traced."""
    if tracer is None:
        return None
    trace = begin_trace(tracer, request.headers.getall(TRACEPARENT_HEADER, ()), operation)
    if trace is not None:
        request[_TRACE] = trace
    return trace


def error_response(wrong: Failure) -> web.Response:
    """Return a failure as an HTTP response."""
    return web.Response(status=wrong.status, body=wrong.payload, content_type="application/json", headers=wrong.headers)
