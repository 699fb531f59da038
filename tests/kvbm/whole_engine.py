"""A worker next to a kvbm: the engine's own client of the socket, core, scheduler, connector and mover, over real
memory; and the connections between engines and kvbm, which break.

    engine ── SocketClient ──▶ FaultyStream ──▶ MemorySockets ──▶ the kvbm's own door

The engine's bytes are `tests.worker.pool_runner`'s: any that are not those of exactly this prefix fail the test.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random

from services.kvbm.service import KvbmService
from services.worker.kv_connector.contract import KvbmNews, KvbmReply
from services.worker.kv_connector.socket_client import SocketClient
from tests.fakes.memory_sockets import MemorySockets, MemoryStream
from tests.kvbm.store_rig import LIMIT_S
from tests.worker import kvbm_world
from tests.worker.kvbm_world import Engine

PAUSES_S = (0.0, 0.0, 0.001, 0.003)
ANSWER_S = 0.15
"""Seconds that a request waits for its reply."""


class Faults:
    """What befalls the connections of workers' engines. `broken` is the share of frames at which a connection ends:
    before or after the frame, or within it. `late` is the share after which nothing comes for a while, as from a kvbm
    that is busy. `short` is the share of sends of which the socket takes a part. `unread` is the share from which kvbm
    handles nothing until some time after the connection has ended. `seen` counts them."""

    def __init__(self, draw: Random, sockets: MemorySockets) -> None:
        self.broken = draw.choice((0.0, 0.01, 0.05))
        self.late = draw.choice((0.0, 0.03))
        self.short = draw.choice((0.0, 0.1))
        self.unread = draw.choice((0.0, 0.03))
        self.draw = draw
        self.seen: Counter[str] = Counter()
        self._sockets = sockets

    def connect(self, path: Path) -> FaultyStream:
        """Connect to the kvbm that listens at `path`. Raise ConnectionRefusedError."""
        return FaultyStream(self._sockets.connect(path, lambda: None), self)

    def befalls(self, fault: str, share: float) -> bool:
        """Return whether the fault comes to pass now."""
        happens = self.draw.random() < share
        self.seen[fault] += happens
        return happens

    def cut(self, frames: bytes, way: str) -> bytes | None:
        """Return what of these bytes still arrives before the connection ends. None if it does not end."""
        if not self.befalls(f"broken {way}", self.broken):
            return None
        whole = self.draw.choice((0, len(frames)))
        within = self.draw.randrange(1, max(2, len(frames)))
        return frames[: within if self.befalls(f"broken within a frame {way}", 0.5) else whole]

    def mend(self) -> None:
        """Let nothing befall connections from now on."""
        self.broken = self.late = self.short = self.unread = 0.0


class FaultyStream:
    """A MemoryStream that breaks, a `services.worker.kv_connector.socket_client.KvbmStream`. It brings each of kvbm's
    frames as one piece of bytes."""

    def __init__(self, stream: MemoryStream, faults: Faults) -> None:
        self._stream = stream
        self._faults = faults
        self._broken = False
        self._late_until_s = 0.0
        self._unread: list[bytes] = []
        """What kvbm handles after the connection has ended."""

    def receive(self) -> bytes | None:
        now_s = asyncio.get_running_loop().time()
        if self._broken:
            return b""
        if now_s < self._late_until_s:
            return None
        data = self._stream.receive()
        if not data:
            return data
        if self._faults.befalls("late", self._faults.late):
            self._late_until_s = now_s + self._faults.draw.uniform(0.0, 1.5 * ANSWER_S)
        cut = self._faults.cut(data, "from kvbm")
        if cut is None:
            return data
        self._break()
        return cut

    def send(self, data: bytes) -> int:
        if self._broken:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        if self._unread:
            self._unread.append(data)
            return len(data)
        if self._faults.befalls("unread", self._faults.unread):
            self._unread.append(data)
            asyncio.get_running_loop().call_later(self._faults.draw.uniform(0.0, 2 * ANSWER_S), self._break)
            return len(data)
        cut = self._faults.cut(data, "to kvbm")
        if cut is not None:
            if cut:
                self._stream.send(cut)
            self._break()
            return len(data)
        if self._faults.befalls("short", self._faults.short):
            data = data[: self._faults.draw.randrange(len(data))]
        return self._stream.send(data) if data else 0

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._break()

    def _break(self) -> None:
        if self._broken:
            return
        self._broken = True
        if self._unread:
            asyncio.get_running_loop().call_later(self._faults.draw.uniform(0.0, ANSWER_S), self._end)
        else:
            self._stream.close()

    def _end(self) -> None:
        with suppress(BrokenPipeError):  # that kvbm has ended
            self._stream.send(b"".join(self._unread))
        self._stream.close()


class Worker:
    """One worker, whose engines live one after the other."""

    def __init__(self, directory: Path, name: str, draw: Random, faults: Faults) -> None:
        self.name = name
        self.acts = 0
        """Turns that its engines have had while they were attached."""
        self._draw = draw
        self._loop = asyncio.get_running_loop()
        self._faults = faults
        self._directory = directory
        self._engines = count(1)
        self._client: SocketClient
        """The living engine's."""

    async def life(self, steps: int, over: Callable[[], bool], pause_s: float) -> Engine:
        """Run an engine for `steps` steps, and now and then for `pause_s` none. The caller ends it."""
        draw = self._draw
        engine = self._start()
        for _ in range(steps):
            if over():
                break
            if len(engine.living) < 4 and draw.random() < 0.4:
                engine.world.submit(engine)
            if draw.random() < 0.02:
                engine.cancel(draw.randrange(4))
            self.acts += bool(engine.link.kvbm)
            for _ in range(draw.randint(1, 6)):
                self._step(engine)
                engine.copy(draw.randint(0, 6))
            await asyncio.sleep(pause_s if draw.random() < 0.03 else draw.choice(PAUSES_S))
        return engine

    def _start(self) -> Engine:
        world = kvbm_world.World(self._directory, self._draw, threads=self._draw.random() < 0.3)
        world.now_s, world.step_s = self._loop.time(), 3.0
        world.answer_s, world.waits_s = ANSWER_S, (0.02, 0.3)
        self._client = SocketClient(self._directory, self._faults.connect)
        return Engine(world, f"{self.name}-{next(self._engines)}")

    def _step(self, engine: Engine) -> bool:
        """Run one step. Return False if there was nothing to do."""
        now_s = engine.world.now_s = self._loop.time()
        for news in self._client.poll(now_s):
            if isinstance(news, KvbmReply) and engine.connector._awaited.get(news.number) == "commit":
                assert b"unknown_ticket" not in news.payload, "the ticket ended while the engine wrote"
            engine.handle(news)
        works = engine.step()
        answers: list[KvbmNews] = []
        while engine.asks:
            answers += self._client.send(engine.asks.popleft(), now_s)
        for news in answers:
            engine.handle(news)
        for asked in self._client.take_asked():
            self._faults.seen[f"asked, {asked.outcome}"] += 1
        return works

    async def rest(self, engine: Engine, kvbm: KvbmService) -> None:
        """Wait until every request is answered, and the kvbm keeps nothing for the engine, although it lives."""
        owner = engine.attachment.hold()

        def rests() -> bool:
            works = self._step(engine)
            engine.copy(8)
            if works or engine.living or not engine.link.kvbm or not engine.connector.idle:
                return False
            layout = kvbm.layouts.open.get(engine.link.layout)
            known = None if layout is None else layout.tickets._owners.get(owner)
            if known is None or known.tickets:
                engine.world.submit(engine)  # a ticket that it knows nothing of ends when it asks for more
                return False
            return True

        async with asyncio.timeout(LIMIT_S):
            while not rests():  # noqa: ASYNC110 - it is driven from here
                await asyncio.sleep(0.001)
        load = engine.scheduler.load()
        assert (load.held_blocks, load.waiting, load.running) == (0, 0, 0)

    def die(self, engine: Engine) -> None:
        """End as the kernel ends a process, in the middle of its copies: the lock is released, its file stays."""
        engine.connector.mover.close()
        engine.attachment._pool.close()
        engine.attachment._name.release()
        self._client.close()
