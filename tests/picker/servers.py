"""Simulated OpenAI servers to which a gateway sends requests: they keep what they got, and answer as a request says."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from aiohttp import web
from msgspec import Struct

from tests.worker.attached.peer import Peer

BODY_LIMIT_BYTES = 64 << 20
PIECES, PAUSE = "x-pieces", "x-pause"
"""The headers of a request that say how many events its answer has, and the seconds before each."""


class ServerRequest(Struct):
    """A request as a server got it."""

    path: str
    size_bytes: int
    digest: str
    headers: dict[str, str]


class SimulatedServer:
    """One server at a HOST:PORT, which can be stopped and started again."""

    def __init__(self, address: str, model: Path) -> None:
        self.address = address
        self.requests: list[ServerRequest] = []
        """The requests of clients: not what attached workers ask."""
        self.running = 0
        self.goes_on = asyncio.Event()
        """While it is not set, answers of events wait after their first event."""
        self.goes_on.set()
        self.peer = Peer(model, int(address.rpartition(":")[2]))
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        app = web.Application(client_max_size=BODY_LIMIT_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        host, _, port = self.address.rpartition(":")
        await web.TCPSite(runner, host.strip("[]"), int(port), reuse_address=True).start()

    async def stop(self) -> None:
        """Close all of its connections, and take no more."""
        await self._stack.aclose()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if PIECES not in request.headers:
            return await self.peer.answer(request)
        body = await request.read()
        digest = hashlib.sha256(body).hexdigest()
        self.requests.append(ServerRequest(request.path, len(body), digest, dict(request.headers)))
        self.running += 1
        try:
            return await self._events(request)
        finally:
            self.running -= 1

    async def _events(self, request: web.Request) -> web.StreamResponse:
        pieces, pause_s = int(request.headers[PIECES]), float(request.headers.get(PAUSE, "0"))
        said = json.dumps({"server": self.address})
        if not pieces:
            await asyncio.sleep(pause_s)
            return web.Response(text=said, content_type="application/json")
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for number in range(pieces):
            await asyncio.sleep(pause_s)
            if number:
                await self.goes_on.wait()
            await answer.write(f"data: {said}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


@asynccontextmanager
async def serving(addresses: list[str], model: Path) -> AsyncIterator[list[SimulatedServer]]:
    """Run a server at each address."""
    servers = [SimulatedServer(address, model) for address in addresses]
    try:
        for server in servers:
            await server.start()
        yield servers
    finally:
        for server in servers:
            await server.stop()
