"""A TCP proxy in front of a picker that records the HTTP/2 frames which the picker sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.servers import free_port

HEADERS, GOAWAY = 1, 7
END_STREAM = 1
_HEAD_BYTES = 9


def frames_of(sent: bytes) -> list[tuple[int, int]]:
    """Return type and flags of each whole frame, in order."""
    frames, at = [], 0
    while at + _HEAD_BYTES <= len(sent):
        frames.append((sent[at + 3], sent[at + 4]))
        at += _HEAD_BYTES + int.from_bytes(sent[at : at + 3])
    return frames


@asynccontextmanager
async def recorded(upstream: str) -> AsyncIterator[tuple[str, bytearray]]:
    """Yield a HOST:PORT for one connection to the picker at `upstream`, and the bytes that the picker has sent."""
    sent, links = bytearray(), set[asyncio.Task[None]]()
    host, _, port = upstream.rpartition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray | None) -> None:
        while piece := await reader.read(1 << 16):
            if record is not None:
                record += piece
            writer.write(piece)
        writer.close()

    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_picker, to_picker = await asyncio.open_connection(host, int(port))
        ways = (copy(reader, to_picker, None), copy(from_picker, writer, sent))
        links.update(asyncio.create_task(way) for way in ways)

    place = free_port()
    server = await asyncio.start_server(link, host, place)
    try:
        yield f"{host}:{place}", sent
    finally:
        server.close()
        for each in links:
            each.cancel()
        await asyncio.gather(*links, return_exceptions=True)
