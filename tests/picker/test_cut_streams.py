"""10,000 requests whose gateways go at each phase leave nothing in the picker's processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.process_costs import rss_bytes
from tests.integration.stack import Up
from tests.picker import ours
from tests.picker.gateway import Gateway, connected, destination

CUT, WARM = 10_000, 2_000
AT_ONCE = 50
PHASES = ("headers", "body", "choosing", "sent", "answering")
BODY = b'{"model": "tiny", "messages": [{"role": "user", "content": "once upon a time"}]}'
GROWTH_BYTES = 4 << 20
"""Most bytes by which a process may grow: 400 bytes a stream."""
LIMIT_S = 60.0


class PickerProcesses:
    """The processes that choose, and what they hold."""

    def __init__(self, up: Up) -> None:
        self._pids = [up.pid(name) for name in up.record["programs"] if name.startswith(("frontend", "router"))]

    def files(self) -> list[int]:
        return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self._pids]

    def memory(self) -> list[int]:
        return [rss_bytes(pid) for pid in self._pids]

    async def until_files_are(self, before: list[int]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while any(now > then for now, then in zip(self.files(), before, strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def cut(gateway: Gateway, number: int) -> None:
    """Begin a request, and go in one of the phases. Every other one stays open until its connection is cut."""
    phase, stream = PHASES[number % len(PHASES)], gateway.ask()
    await stream.headers({":method": "POST", ":path": "/v1/chat/completions"})
    if phase != "headers":
        await stream.body(BODY, ended=phase != "body")
    if phase in ("sent", "answering"):
        assert destination(await stream.read())[0]
    if phase == "answering":
        await stream.answer({":status": "200", "content-type": "text/event-stream"})
    if number // len(PHASES) % 2:
        stream.call.cancel()


async def cut_many(address: str, count: int) -> None:
    """Cut this many requests, on a new connection for every AT_ONCE of them."""
    for first in range(0, count, AT_ONCE):
        async with connected(address) as gateway:
            await asyncio.gather(*(cut(gateway, number) for number in range(first, first + AT_ONCE)))


@pytest.mark.tier("long")
async def test_ten_thousand_streams_that_are_cut_leave_neither_memory_nor_files(tmp_path: Path) -> None:
    async with ours.fleet(tmp_path) as (picker, _, up):
        processes = PickerProcesses(up)
        files = processes.files()
        await cut_many(picker, WARM)
        await processes.until_files_are(files)
        memory = processes.memory()
        await cut_many(picker, CUT)
        await processes.until_files_are(files)
        grown = [now - then for now, then in zip(processes.memory(), memory, strict=True)]
        print(f"memory after {WARM}: {memory}, grown after {CUT} more: {grown}, files: {files}")
        assert max(grown) < GROWTH_BYTES
        async with connected(picker) as gateway:
            stream = gateway.ask()
            await stream.headers({":method": "POST", ":path": "/v1/chat/completions"})
            await stream.body(BODY)
            assert destination(await stream.read())[0]
            await stream.end()
