"""The KV events of a server that is not ours, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from services.worker.attached.events import read_events
from services.worker.attached.vllm_api import VLLM
from services.worker.config import AttachedConfig
from services.worker.vllm import events as vllm_events
from shared.errors import ConfigError, Unavailable
from shared.messages.kv_events import AllBlocksCleared, BlockRemoved, EventBatch, KvEvent

LIMIT_S = 180.0


class Publisher:
    """A server's sockets, and a reader of its events. Batch n has one event, which names block n."""

    def __init__(self, directory: Path, *, replay: bool) -> None:
        self.topic = [b"topic"]
        """The frame before the number in what is sent again. Before vLLM 0.26 there is none."""
        self.kept: list[int] = []
        self.found: list[int | str] = []
        """The blocks that were named, and `cleared`."""
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.bind(f"ipc://{directory}/e")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"ipc://{directory}/r")
        config = AttachedConfig(events=f"ipc://{directory}/e", replay=f"ipc://{directory}/r" if replay else "")
        self._heard = asyncio.Event()
        self.reading = asyncio.ensure_future(read_events(config, VLLM.events, self._apply))
        self._serving = asyncio.ensure_future(self._serve())

    async def joined(self) -> None:
        assert await self._pub.recv() == b"\x01"

    async def send(self, number: int, *, lost: bool = False) -> None:
        self.kept.append(number)
        if not lost:
            await self.send_raw(number, self._batch(number))

    async def send_raw(self, number: int, payload: bytes) -> None:
        await self._pub.send_multipart([b"topic", number.to_bytes(8, "big"), payload])

    async def send_frames(self, *frames: bytes) -> None:
        await self._pub.send_multipart(frames)

    async def until(self, found: list[int | str]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.found != found:
                self._heard.clear()
                await self._heard.wait()

    async def close(self) -> None:
        self.reading.cancel()
        self._serving.cancel()
        await asyncio.gather(self.reading, self._serving, return_exceptions=True)
        self._context.destroy(linger=0)

    def _apply(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlockRemoved):
                self.found.extend(name for name in event.block_hashes if isinstance(name, int))
            elif isinstance(event, AllBlocksCleared):
                self.found.append("cleared")
        self._heard.set()

    async def _serve(self) -> None:
        while True:
            who, _, first = await self._router.recv_multipart()
            for number in self.kept:
                if number >= int.from_bytes(first, "big"):
                    batch = self._batch(number)
                    await self._router.send_multipart([who, b"", *self.topic, number.to_bytes(8, "big"), batch])
            await self._router.send_multipart([who, b"", *self.topic, (-1).to_bytes(8, "big", signed=True), b""])

    @staticmethod
    def _batch(number: int) -> bytes:
        return msgspec.msgpack.encode(EventBatch(0.0, [BlockRemoved([number])]))


@asynccontextmanager
async def publisher(
    directory: Path, *, replay: bool = True, before: tuple[int, ...] = (), topic: tuple[bytes, ...] = (b"topic",)
) -> AsyncIterator[Publisher]:
    one = Publisher(directory, replay=replay)
    one.topic[:] = topic
    one.kept += before
    try:
        await one.joined()
        yield one
    finally:
        await one.close()


@pytest.mark.parametrize("topic", [(b"topic",), ()])
async def test_what_came_before_and_what_was_lost_is_replayed(tmp_path: Path, topic: tuple[bytes, ...]) -> None:
    async with publisher(tmp_path, before=(0, 1), topic=topic) as one:
        await one.until([0, 1])
        await one.send(2)
        await one.send(3, lost=True)
        await one.send(4)
        await one.until([0, 1, 2, 3, 4])


async def test_without_a_replay_the_reader_begins_where_it_came_in_and_forgets_at_a_gap(tmp_path: Path) -> None:
    async with publisher(tmp_path, replay=False) as one:
        await one.send(7)
        await one.send(8)
        await one.until([7, 8])
        await one.send(10)
        await one.until([7, 8, "cleared", 10])


async def test_a_number_that_goes_backwards_is_a_new_server(tmp_path: Path) -> None:
    async with publisher(tmp_path, replay=False) as one:
        await one.send(7)
        await one.send(0)
        with pytest.raises(Unavailable, match=r"attached\.events: the server was started again"):
            await asyncio.wait_for(one.reading, LIMIT_S)


async def test_an_endpoint_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"attached\.events: tcp://nowhere"):
        await asyncio.wait_for(
            read_events(AttachedConfig(events="tcp://nowhere"), VLLM.events, lambda _: None), LIMIT_S
        )


async def test_an_event_of_a_newer_vllm_forgets_what_was_known_and_the_reader_goes_on(tmp_path: Path) -> None:
    async with publisher(tmp_path, replay=False) as one:
        await one.send(7)
        await one.send_raw(8, msgspec.msgpack.encode([0.0, [{"type": "TierBlocksCleared", "medium": "GPU"}]]))
        await one.send(9)
        await one.until([7, "cleared", 9])


async def test_batches_of_another_form_are_named(tmp_path: Path) -> None:
    async with publisher(tmp_path, replay=False) as one:
        await one.send_raw(0, msgspec.msgpack.encode([0.0, [["BlockRemoved", [1]]]]))
        with pytest.raises(ConfigError, match=r"attached\.events: .* publishes no events as vLLM 0\.32 has them"):
            await asyncio.wait_for(one.reading, LIMIT_S)


@pytest.mark.parametrize("frames", [(b"topic",), (b"topic", bytes(8)), (b"topic", bytes(8), b"", b"")])
async def test_messages_of_another_form_are_named(tmp_path: Path, frames: tuple[bytes, ...]) -> None:
    async with publisher(tmp_path, replay=False) as one:
        await one.send_frames(*frames)
        with pytest.raises(ConfigError, match=r"attached\.events: .* publishes no events as vLLM 0\.32 has them"):
            await asyncio.wait_for(one.reading, LIMIT_S)


async def test_a_replay_is_read_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_events, "REPLAY_LIMIT_BYTES", 1)
    async with publisher(tmp_path, before=(0, 1)) as one:
        await one.until([0])
        await one.send(2)
        await one.until([0, 1, 2])
