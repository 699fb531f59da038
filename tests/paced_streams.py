"""Streams of a frontend over HTTP, read side by side: what came, and the longest time in which one was silent."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import aiohttp


@dataclass
class PacedStreams:
    """All streams of one load. `progress` is set whenever something came."""

    tokens: int
    """The number of tokens that each stream must have."""
    came: int = 0
    lost: list[str] = field(default_factory=list)
    """Why streams are not whole."""
    gap_s: float = 0.0
    """The longest time between two pieces of one stream."""

    async def run(self, url: str, model: str, count: int, limit_s: float) -> None:
        """Read `count` streams to their ends."""
        connector = aiohttp.TCPConnector(limit=count)
        timeout = aiohttp.ClientTimeout(limit_s)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http, asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(self._read(http, url, model, number))

    async def _read(self, http: aiohttp.ClientSession, url: str, model: str, number: int) -> None:
        clock, tokens, said = asyncio.get_running_loop().time, 0, ""
        body = {
            "model": model,
            "prompt": f"the mill number {number} turns",
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with http.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                self.lost.append(f"{response.status}: {await response.text()}")
                return
            last_s: float | None = None
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                now_s = clock()
                if last_s is not None:
                    self.gap_s = max(self.gap_s, now_s - last_s)
                last_s = now_s
                said = line[6:].decode().strip()
                self.came += 1
                if said != "[DONE]":
                    piece = json.loads(said)
                    tokens = (piece.get("usage") or {}).get("completion_tokens", tokens)
                    if "error" in piece:
                        self.lost.append(said)
        if tokens != self.tokens or said != "[DONE]":
            self.lost.append(f"{tokens} of {self.tokens} tokens, and at last {said[:200]}")
