"""A kvbm in a drawer that listens at the socket of its pool's directory, for engines in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from services.worker.contracts.messages import KvbmOperation
from services.worker.kv_connector.contract import KvbmAsk
from shared.pool.lock import SOCKET
from shared.pool.socket_frames import PROTOCOL, TO_KVBM, Answered, FrameReader, Hello, encode_frame
from tests.worker.kvbm_drawer import Drawer


def answers(drawer: Drawer, ask: KvbmAsk, now_s: float) -> list[Answered]:
    """Return all answers to a request at once: what is on disk is read, and what is awaited is there."""
    replies, ticket = drawer.answer(ask, now_s)
    while drawer.reads:
        drawer.read("ok", now_s)
    replies += [reply for reply in drawer.advanced.pop(ticket, []) if reply]
    return [Answered(ask.number, reply, last=place == len(replies)) for place, reply in enumerate(replies, 1)]


@asynccontextmanager
async def listening(directory: Path, drawer: Drawer) -> AsyncIterator[None]:
    """Serve the drawer to all that connect; afterwards their connections are closed."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(encode_frame(Hello(PROTOCOL, drawer.name)))
        frames = FrameReader()
        while data := await reader.read(1 << 16):
            for body in frames.feed(data):
                asked = TO_KVBM.decode(body)
                ask = KvbmAsk(asked.number, cast(KvbmOperation, asked.operation), asked.payload)
                for answered in answers(drawer, ask, asyncio.get_running_loop().time()):
                    writer.write(encode_frame(answered))

    path = directory / SOCKET
    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        path.unlink()
