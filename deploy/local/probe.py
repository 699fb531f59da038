"""Sends one HTTP GET to a process on this machine, without a client library, which would cost start-up time."""

from __future__ import annotations

import asyncio

LIMIT_BYTES = 1 << 20
"""Limit of the answer that is read."""


async def get(url: str, *, timeout_s: float) -> tuple[int, bytes]:
    """Return (status, body). Raises OSError without an answer in time, or if the answer is not HTTP."""
    host, _, rest = url.removeprefix("http://").partition(":")
    port, _, path = rest.partition("/")
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(f"GET /{path} HTTP/1.0\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                answer = bytearray()
                while len(answer) < LIMIT_BYTES and (piece := await reader.read(1 << 16)):
                    answer += piece
            finally:
                writer.close()
    except TimeoutError:
        raise OSError(f"{url}: no answer within {timeout_s} s") from None
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise OSError(f"{url}: not an HTTP answer")
    return int(words[1]), body
