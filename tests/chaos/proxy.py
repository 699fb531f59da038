"""A TCP proxy in front of one server for one process, whose link can be cut.

open ──sever──▶ severed      connections are broken, new ones refused
 ▲ └───hang───▶ hung         nothing passes, in either direction; new connections are taken and wait
 └──────mend────┘            what waited passes
"""

from __future__ import annotations

import asyncio
from typing import Literal

_CHUNK_BYTES = 1 << 16


class Proxy:
    """Listens on `port` of the loopback; the server is at `upstream`."""

    def __init__(self, port: int, upstream: int, pause_s: float = 0.0) -> None:
        """`pause_s` seconds pass for each 64 KiB, in either direction of a connection."""
        self.port = port
        self.state: Literal["open", "hung", "severed"] = "severed"
        self._upstream = upstream
        self._pause_s = pause_s
        self._passing = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def mend(self) -> None:
        """Open the link; also how it begins."""
        self.state = "open"
        self._passing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._link, "127.0.0.1", self.port)

    async def hang(self) -> None:
        assert self.state == "open"
        self.state = "hung"
        self._passing.clear()

    async def sever(self) -> None:
        """Also how it ends."""
        self.state = "severed"
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        to_server: asyncio.StreamWriter | None = None
        try:
            await self._passing.wait()
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._upstream)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, to_server))
                tasks.create_task(self._pass(from_server, writer))
        except* (OSError, asyncio.CancelledError, _Ended):
            pass
        finally:
            self._links.discard(task)
            for one in (writer, to_server):
                if one is not None:
                    one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until its end: then the other one ends too."""
        while received := await reader.read(_CHUNK_BYTES):
            await self._passing.wait()
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
            writer.write(received)
            await writer.drain()
        raise _Ended


class _Ended(Exception):
    """One side has closed."""
