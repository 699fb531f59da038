"""The cuttable link: what passes it, and what does not while it is cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.chaos.proxy import Proxy
from tests.servers import free_port

LIMIT_S = 180.0


@asynccontextmanager
async def echo() -> AsyncIterator[tuple[Proxy, list[bytes]]]:
    """An open link to a server that says everything again, and what that server has read."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while received := await reader.read(100):
            heard.append(received)
            writer.write(received)
        writer.close()

    upstream = free_port()
    server = await asyncio.start_server(serve, "127.0.0.1", upstream)
    proxy = Proxy(free_port(), upstream)
    await proxy.mend()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield proxy, heard
    finally:
        await proxy.sever()
        server.close()


async def test_bytes_pass_both_ways_and_so_does_the_end() -> None:
    async with echo() as (proxy, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"water")
        assert await reader.readexactly(5) == b"water"
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()


async def test_a_severed_link_breaks_connections_and_takes_none_until_it_is_mended() -> None:
    async with echo() as (proxy, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"water")
        await reader.readexactly(5)
        await proxy.sever()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", proxy.port)
        await proxy.mend()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"again")
        assert await reader.readexactly(5) == b"again"
        writer.close()


async def test_a_hung_link_holds_everything_back_and_loses_nothing() -> None:
    async with echo() as (proxy, heard):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"water")
        await reader.readexactly(5)
        await proxy.hang()
        writer.write(b"waits")
        later_reader, later = await asyncio.open_connection("127.0.0.1", proxy.port)
        later.write(b"later")
        await later.drain()
        assert heard == [b"water"]
        await proxy.mend()
        assert await reader.readexactly(5) == b"waits"
        assert await later_reader.readexactly(5) == b"later"
        writer.close()
        later.close()


async def test_a_link_to_a_server_that_is_away_breaks_at_once() -> None:
    async with asyncio.timeout(LIMIT_S):
        proxy = Proxy(free_port(), free_port())
        await proxy.mend()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        await proxy.sever()
