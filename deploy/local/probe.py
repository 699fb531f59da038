"""Sends one HTTP GET to a process on this machine, without a client library."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

LIMIT_BYTES = 1 << 20
"""Limit of the answer that is read, if a caller sets none."""


async def get(url: str, *, timeout_s: float, limit_bytes: int = LIMIT_BYTES) -> tuple[int, bytes]:
    """Return (status, body). Raise OSError without an answer in time, or if it is too large or not HTTP."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                writer.write(f"GET {parts.path} HTTP/1.0\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
                answer = bytearray()
                while piece := await reader.read(1 << 16):
                    answer += piece
                    if len(answer) > limit_bytes:
                        raise OSError(f"{url}: the answer has more than {limit_bytes} bytes")
            finally:
                writer.close()
    except TimeoutError:
        raise OSError(f"{url}: no answer within {timeout_s} s") from None
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise OSError(f"{url}: not an HTTP answer")
    return int(words[1]), body
