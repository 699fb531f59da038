"""What all requests at the HTTP door have in common: a browser's question, a key, and some headers of every answer.

no version in its first line, or two keys   ──▶  400
a body with a Content-Encoding              ──▶  415, unread
OPTIONS with Origin, where origins are set  ──▶  204 or 403, no key needed
any but OPEN, where keys are asked for      ──▶  401, before the body is read, or the request's account
every answer                                ──▶  X-Request-Id, what is left of the key's limits, and that nobody
                                                 is to keep it or to guess its type; not what server this is
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion10, web

from services.frontend.auth.access import HEADER, Authenticator
from services.frontend.auth.accounts import Account
from services.frontend.config import HttpConfig
from services.frontend.protocol.errors import Failure, failure_of
from services.frontend.server.cors import Cors
from services.frontend.serving.request_context import RequestId, request_id
from shared.errors import InvalidRequest

REQUEST_ID_HEADER = "X-Request-Id"
ENCODING_HEADER = "Content-Encoding"
KEYLESS_PATHS = frozenset({"/live", "/health"})
"""Paths that need no key: a balancer has none."""
_REQUEST_ID = web.RequestKey("named", RequestId)
_ACCOUNT = web.RequestKey("account", Account)
_OPTIONS = 204

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Middleware:
    """Of one HTTP door. Its middleware is to be the one just before the handlers."""

    def __init__(self, access: Authenticator, config: HttpConfig) -> None:
        self._access = access
        self._cors = Cors(config.cors_origins)

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets it through, or answers it."""
        if (unfit := _unfit(request)) is not None:
            return error_response(failure_of(unfit))
        if self._cors.is_preflight(request.method, request.headers):
            allowed = self._cors.preflight_headers(request.headers)
            return (
                error_response(allowed)
                if isinstance(allowed, Failure)
                else web.Response(status=_OPTIONS, headers=allowed)
            )
        if request.path not in KEYLESS_PATHS:
            try:
                account = self._access.authenticate(request.headers.get(HEADER))
            except InvalidRequest as wrong:
                return error_response(failure_of(wrong))
            if account is not None:
                request[_ACCOUNT] = account
        return await handler(request)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """For `on_response_prepare`."""
        headers = response.headers
        headers[REQUEST_ID_HEADER] = request_id_of(request).shown
        headers["X-Content-Type-Options"] = "nosniff"
        headers["Cache-Control"] = "no-store"
        headers.pop("Server", None)
        headers.update(self._cors.answer_headers(request.headers.get("Origin")))
        if (account := account_of(request)) is not None:
            headers.update(account.rate_limit_headers(asyncio.get_running_loop().time()))


def _unfit(request: web.Request) -> InvalidRequest | None:
    """What is wrong with it, whoever asks for whatever."""
    if request.version < HttpVersion10:
        return InvalidRequest("the request's first line names no version of HTTP; 1.0 and 1.1 are served")
    if len(request.headers.getall(HEADER, ())) > 1:
        return InvalidRequest(f"{HEADER}: it is there more than once", param=HEADER)
    codings = ",".join(request.headers.getall(ENCODING_HEADER, ())).lower().split(",")
    if request.body_exists and {coding.strip() for coding in codings} - {"", "identity"}:
        return InvalidRequest(
            f"{ENCODING_HEADER}: a body is read as it is sent, so send it without a coding",
            param=ENCODING_HEADER,
            status=415,
        )
    return None


def account_of(request: web.Request) -> Account | None:
    """Whose it is; None: no key was asked for."""
    return request.get(_ACCOUNT)


def request_id_of(request: web.Request) -> RequestId:
    """The request's name; the same at each call."""
    if _REQUEST_ID not in request:
        request[_REQUEST_ID] = request_id(request.headers.get(REQUEST_ID_HEADER, ""))
    return request[_REQUEST_ID]


def error_response(wrong: Failure) -> web.Response:
    """A refusal as a response."""
    return web.Response(status=wrong.status, body=wrong.payload, content_type="application/json", headers=wrong.headers)
