"""The paths of the page, on the API's port or on a port of its own.

    GET /ui, /ui/page.css, …        the page itself; needs no key, so that it can ask for one
    GET /ui/events                  snapshots as server-sent events, one a second
    GET /ui/decision?request=ID     what routers remember of a request, as JSON

All of them only answer the page's own origin, and clients that are no browsers (shared/runtime/origin.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from importlib.resources import files

import msgspec
from aiohttp import web
from msgspec import Struct

from services.frontend.config import UiConfig
from services.frontend.protocol.errors import failure, failure_of, field_error
from services.frontend.requests.service import RequestService
from services.frontend.requests.way import WayLog
from services.frontend.server.cors import NOT_ALLOWED
from services.frontend.server.middleware import account_of, error_response
from services.frontend.server.sse import ResponseBody
from services.frontend.ui.collector import Collector
from services.frontend.ui.pages import Pages
from shared.errors import HeadraceError, InvalidRequest, Unavailable
from shared.request_names import bare_id
from shared.runtime.origin import OriginRule
from shared.runtime.runtime import Runtime

UNREAD_S = 10.0
"""Seconds that a page may leave its events unread; then it is cut off."""
REQUEST_LIMIT_CHARACTERS = 200
"""The longest id that can be asked for: the client's 64, ours, and what an answer's id has before them."""
REQUESTS_KEPT = 64
"""Ways of requests that one frontend keeps."""
QUESTIONS_LIMIT = 8
"""Questions to routers at the same time."""
_EVENT_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}


PATH = "/ui"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # pictures that models make come as data
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""The headers of every answer below /ui."""
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class PageFile(Struct, frozen=True):
    """The content of one file, and its type."""

    content: bytes
    content_type: str


def page_files() -> dict[str, PageFile]:
    """Return the files of the page by their path.

        /ui                 index.html
        /ui/page.css, …     the other files of the folder `page`, by name

    The Content-Security-Policy allows scripts, styles and connections of the same origin alone: no inline script or
    style, no other host, no frame around it. Trusted Types forbid that a text becomes markup.
    """
    found: dict[str, PageFile] = {}
    for each in files("services.frontend.ui").joinpath("page").iterdir():
        kind = _TYPES.get(each.name[each.name.rfind(".") :])
        if kind is not None:
            path = PATH if each.name == "index.html" else f"{PATH}/{each.name}"
            found[path] = PageFile(each.read_bytes(), kind)
    assert PATH in found, "the package lacks its page"
    return found


class PageApi:
    """The handlers. `keys`: whether the API needs a key, which server/middleware.py checks. `hosts`: names of the
    API's port."""

    def __init__(
        self, runtime: Runtime, service: RequestService, config: UiConfig, hosts: Iterable[str] = (), *, keys: bool
    ) -> None:
        self._service = service
        self._collector = Collector(runtime, service)
        self._pages = Pages(self._collector, runtime.tasks, config.pages)
        self._rule = OriginRule("ui", frozenset(name.lower() for name in (*config.hosts, *hosts)), any_host=keys)
        self._files = page_files()
        self._asking = 0

    @property
    def keyless_paths(self) -> list[str]:
        """The paths of the page itself, without data."""
        return [*self._files, f"{PATH}/"]

    async def start(self) -> None:
        """Keep the ways of requests from now on, and answer other frontends that ask for them."""
        self._service.ways = WayLog(REQUESTS_KEPT)
        await self._collector.start()

    def close(self) -> None:
        """End all open pages, and let in none from now on."""
        self._pages.close()

    def add_routes(self, app: web.Application) -> None:
        """Add the paths, and the headers of all answers below them."""
        app.on_response_prepare.append(_add_headers)
        for path, file in self._files.items():
            app.router.add_get(path, partial(self._file, file))
        app.router.add_get(f"{PATH}/", self._without_slash)
        app.router.add_get(f"{PATH}/events", self._events, allow_head=False)
        app.router.add_get(f"{PATH}/decision", self._decision, allow_head=False)

    async def _file(self, file: PageFile, request: web.Request) -> web.Response:
        if (refused := self._refusal(request)) is not None:
            return refused
        return web.Response(body=file.content, content_type=file.content_type, charset="utf-8")

    async def _without_slash(self, _request: web.Request) -> web.Response:
        return web.Response(status=308, headers={"Location": f"..{PATH}"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._refusal(request)) is not None:
            return refused
        try:
            if request.query:
                raise InvalidRequest(f"{PATH}/events has no parameters")
            body = ResponseBody(request, _EVENT_HEADERS, unread_s=UNREAD_S)
            account = account_of(request)
            async with aclosing(self._pages.snapshots("" if account is None else account.name)) as snapshots:
                async for payload in snapshots:
                    await body.write(payload)
            if not body.begun:
                raise Unavailable("the view of the fleet cannot be made now")
            return await body.end(None)
        except HeadraceError as wrong:
            return error_response(failure_of(wrong))

    async def _decision(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._refusal(request)) is not None:
            return refused
        try:
            name = _asked_for(request)
            async with self._place():
                found = await self._collector.decisions(name)
            return web.Response(body=msgspec.json.encode(found), content_type="application/json")
        except HeadraceError as wrong:
            return error_response(failure_of(wrong))

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if self._asking >= QUESTIONS_LIMIT:
            raise Unavailable(f"{QUESTIONS_LIMIT} questions to routers are open; ask again")
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1

    def _refusal(self, request: web.Request) -> web.Response | None:
        why = self._rule.refusal(request.headers, linkable=request.path == PATH)
        return error_response(failure(403, why, "invalid_request_error", code=NOT_ALLOWED)) if why else None


def _asked_for(request: web.Request) -> str:
    """Return the id in the query. Raise InvalidRequest."""
    if stranger := next((name for name in request.query if name != "request"), ""):
        raise field_error(ascii(stranger[:80]), "unknown query parameter; use `request`")
    names = request.query.getall("request", [])
    if len(names) != 1 or not bare_id(names[0]) or not names[0].isprintable():
        raise field_error("request", "must be the id of one request")
    if len(names[0]) > REQUEST_LIMIT_CHARACTERS:
        raise field_error("request", f"has more than {REQUEST_LIMIT_CHARACTERS} characters")
    return names[0].strip()


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    if request.path == PATH or request.path.startswith(f"{PATH}/"):
        response.headers.update(HEADERS)
