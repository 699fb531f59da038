"""Drives a real engine through its channel, as a worker's shell does, and keeps what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from services.worker.config import EngineName, WorkerConfig
from services.worker.contracts.messages import (
    CancelAttempt,
    EncodeImage,
    EngineLoad,
    EngineOperation,
    Failed,
    ImageEncoded,
    KvbmLink,
    MemoryUse,
    Operate,
    Operated,
    OwnMetrics,
    Probed,
    Ready,
    Snapshot,
    Stepped,
    Submit,
    TakeEngineSnapshot,
)
from services.worker.engine.channel import ChannelClosed
from services.worker.engine.contract import Engine
from services.worker.engine_start import start_engine
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages.frames import Part
from shared.messages.generate import Sampling
from shared.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

LIMIT_S = 900.0
START_LIMIT_S = 900.0
"""vLLM took more than five minutes on a machine that was ten times slower than a quiet one."""


class DrivenEngine:
    """One engine, and everything that it has reported."""

    def __init__(self, engine: EngineName, process: Engine, facts: Ready) -> None:
        self.engine = engine
        self.process = process
        self.facts = facts
        self.parts: dict[str, list[Part]] = {}
        self.published: set[int] = set()
        """The hashes of all blocks that its events say are cached, at rank 0."""
        self.published_at: dict[int, set[int]] = {0: self.published}
        """The same of each rank that has reported."""
        self.events = 0
        """Number of blocks that events have said were stored."""
        self.digest = 0
        self.digest_of: dict[int, int] = {}
        """Rank → digest after its last report."""
        self.event_sequence = -1
        self.load = EngineLoad()
        self.failed = ""
        """Why the engine said that it cannot go on."""
        self.gone = False
        self._snapshots: dict[int, Snapshot] = {}
        self._operated: dict[int, Operated] = {}
        self._encoded: dict[int, ImageEncoded] = {}
        self.link = KvbmLink("")
        self._numbers = 0
        self._changed = asyncio.Event()
        self._following = asyncio.ensure_future(self._follow())

    @classmethod
    async def start(cls, config: WorkerConfig) -> Self:
        """Start an engine and wait until it is ready. Raise AssertionError with the reason where it fails."""
        process = await start_engine(config, "tiny", "worker")
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while not isinstance(report := await process.receive(), Ready):
                    assert not isinstance(report, Failed), report.reason
        except BaseException:
            await process.end(0.0, lambda _: None)
            raise
        return cls(config.engine, process, report)

    async def close(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self.process.end(10.0, lambda _: None)

    def submit(
        self, request: str, prompt: list[int], sampling: Sampling, *, output: list[int] | None = None, **fields: object
    ) -> None:
        """Submit the first attempt of a request; `output` is what an earlier attempt has produced."""
        self._numbers += 1
        tokens = pack_tokens([*prompt, *(output or [])])
        given = {"time_left_s": LIMIT_S, "number": self._numbers} | fields
        self.process.submit(Submit(request, 1, "frontend", tokens, len(prompt), sampling, **given))  # type: ignore[arg-type]

    def cancel(self, request: str) -> None:
        self.process.send(CancelAttempt(request, 1))

    async def answer(self, request: str, prompt: list[int], sampling: Sampling, **fields: object) -> list[int]:
        """Submit a request, wait for its end, and return its tokens."""
        self.submit(request, prompt, sampling, **fields)  # type: ignore[arg-type]
        await self.ended(request)
        return self.tokens(request)

    def tokens(self, request: str) -> list[int]:
        """Return all tokens of a request so far; its parts follow one another without a gap."""
        parts = self.parts.get(request, [])
        tokens: list[int] = []
        for part in parts:
            assert part.first == parts[0].first + len(tokens)
            tokens += unpack_tokens(part.tokens)
        return tokens

    async def ended(self, request: str) -> Part:
        """Wait until a request has ended; return its last part."""
        await self.until(lambda: bool(self.parts.get(request)) and self.parts[request][-1].finish is not None)
        return self.parts[request][-1]

    async def snapshot(self, rank: int = 0) -> Snapshot:
        self._numbers += 1
        ticket = self._numbers
        self.process.send(TakeEngineSnapshot(ticket, rank))
        await self.until(lambda: ticket in self._snapshots)
        return self._snapshots[ticket]

    async def operate(self, operation: EngineOperation, *, name: str = "", path: str = "", level: int = 1) -> str:
        """Have the engine do an operation; return why it was not done."""
        self._numbers += 1
        ticket = self._numbers
        self.process.send(Operate(ticket, operation, name, path, level))
        await self.until(lambda: ticket in self._operated)
        return self._operated[ticket].failed

    async def encode(self, key: bytes, pixels: bytes, limit_s: float = LIMIT_S, *size: int) -> str:
        """Have the engine encode an image for others; return why it was not encoded."""
        self._numbers += 1
        ticket = self._numbers
        self.process.send(EncodeImage(ticket, key, pixels, limit_s, *size))
        await self.until(lambda: ticket in self._encoded)
        return self._encoded[ticket].failed

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not met():
                assert not self._following.done() or self.gone, self._following.exception()
                self._changed.clear()
                await self._changed.wait()

    async def _follow(self) -> None:
        while True:
            try:
                report = await self.process.receive()
            except ChannelClosed:
                self.gone = True
                self._changed.set()
                return
            match report:
                case Stepped():
                    self._record_step(report)
                case Snapshot():
                    self._snapshots[report.ticket] = report
                case Operated():
                    self._operated[report.ticket] = report
                case Failed(reason):
                    self.failed = reason
                case ImageEncoded():
                    self._encoded[report.ticket] = report
                case KvbmLink():
                    self.link = report
                case Probed() | MemoryUse() | OwnMetrics():
                    pass
                case _:
                    self._changed.set()
                    raise AssertionError(report)
            self._changed.set()

    def _record_step(self, step: Stepped) -> None:
        self.load, self.digest = step.load, step.digest
        self.digest_of[step.rank] = step.digest
        assert step.event_sequence == self.event_sequence + bool(step.event_batch) or self.event_sequence < 0
        self.event_sequence = step.event_sequence
        published = self.published_at.setdefault(step.rank, set())
        for parts in step.parts.values():
            for part in parts:
                self.parts.setdefault(part.request, []).append(part)
        for event in step.events:
            match event:
                case BlockStored():
                    hashes = {name for name in event.block_hashes if isinstance(name, int)}
                    assert not hashes & published, "a block is stored that is there"
                    published |= hashes
                    self.events += len(hashes)
                case BlockRemoved():
                    assert published.issuperset(event.block_hashes), "a block is removed that is not there"
                    published.difference_update(name for name in event.block_hashes if isinstance(name, int))
                case AllBlocksCleared():
                    published.clear()
