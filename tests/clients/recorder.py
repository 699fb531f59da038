"""A proxy between an agent and a frontend: it notes each request with its answer, and can cut a stream.

It is also the agent's proxy for all other addresses: it refuses to connect to them, and notes which they were.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web
from msgspec import Struct

LIMIT_BYTES = 16 << 20
LIMIT_S = 600.0
CUT_AFTER_BYTES = 400


class Exchange(Struct):
    """One request and its answer."""

    path: str
    body: dict[str, Any]
    """Empty if the request has none."""
    status: int
    ignored: tuple[str, ...]
    """The fields that the frontend ignored."""
    error: str
    """The answer's text if its status is an error."""
    answer: bytearray
    """What came of the answer; empty if its status is an error."""

    @property
    def usage(self) -> dict[str, Any]:
        """The answer's last `usage`; empty if it has none."""
        _, mark, text = self.answer.decode(errors="replace").rpartition('"usage":{')
        found: dict[str, Any] = json.JSONDecoder().raw_decode("{" + text)[0] if mark else {}
        return found


def tokens(exchanges: Iterable[Exchange]) -> dict[str, int]:
    """Return how many tokens of prompts and of completions the answers say there were; vectors are left out."""
    said = [one.usage for one in exchanges if "completion_tokens" in one.usage]
    return {name: sum(usage[name] for usage in said) for name in ("prompt_tokens", "completion_tokens")}


class Recorder:
    """What went through the proxy."""

    def __init__(self, url: str, forwarded: str) -> None:
        self.url = url
        """The address for agents, without a path."""
        self.exchanges: list[Exchange] = []
        self.cuts = 0
        """Streams that are still to be cut, each after CUT_AFTER_BYTES."""
        self.strangers: set[str] = set()
        """Other addresses that the agent asked for."""
        self._forwarded = forwarded

    @property
    def asked(self) -> list[Exchange]:
        """The requests that have a body."""
        return [one for one in self.exchanges if one.body]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward a request to the frontend."""
        if request.method == "CONNECT" or request.host not in self.url:
            self.strangers.add(request.host)
            return web.Response(status=403)
        body = await request.read()
        kept = {
            name: value for name, value in request.headers.items() if name.lower() not in ("host", "content-length")
        }
        async with (
            ClientSession(timeout=ClientTimeout(LIMIT_S), auto_decompress=False) as client,
            client.request(request.method, self._forwarded + request.path_qs, data=body, headers=kept) as answer,
        ):
            named = answer.headers.get("X-Headrace-Ignored", "")
            error = "" if answer.status < 400 else (await answer.read()).decode(errors="replace")
            fields = tuple(filter(None, named.split(", ")))
            one = Exchange(request.path, json.loads(body) if body else {}, answer.status, fields, error, bytearray())
            self.exchanges.append(one)
            dropped = ("content-length", "transfer-encoding", "connection")
            headers = {name: value for name, value in answer.headers.items() if name.lower() not in dropped}
            reply = web.StreamResponse(status=answer.status, headers=headers)
            await reply.prepare(request)
            if error:
                await reply.write(error.encode())
                return reply
            is_cut = self.cuts > 0 and "event-stream" in answer.headers.get("Content-Type", "")
            self.cuts -= is_cut
            sent = 0
            async for piece in answer.content.iter_any():
                one.answer += piece
                await reply.write(piece[: CUT_AFTER_BYTES - sent] if is_cut else piece)
                sent += len(piece)
                if is_cut and sent >= CUT_AFTER_BYTES:
                    break
            if is_cut and request.transport is not None:
                request.transport.abort()
            return reply


@contextlib.asynccontextmanager
async def recorder(url: str) -> AsyncIterator[Recorder]:
    """A proxy in front of a frontend's address."""
    application = web.Application(client_max_size=LIMIT_BYTES)
    runner = web.AppRunner(application, access_log=None)
    found = Recorder("", url)
    application.router.add_route("*", "/{path:.*}", found.handle)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    found.url = f"http://{host}:{port}"
    try:
        yield found
    finally:
        await runner.cleanup()
