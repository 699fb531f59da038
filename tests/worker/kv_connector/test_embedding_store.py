"""Embeddings of images in a real kvbm: found by other engines, and encoded where kvbm does not help."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from services.kvbm.config import DiskConfig, KvbmConfig, PoolConfig
from services.kvbm.service import KvbmService, kvbm
from services.kvbm.tickets.results import TicketLimits
from services.worker.kv_connector import embedding_store
from services.worker.kv_connector.embedding_store import KvbmEmbeddings
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.discovery.memory import MemoryStore
from shared.messages.cards import KvLayout
from shared.messages.kvbm import StoreLayout
from shared.pool.lock import SOCKET
from tests.fake_runtime import fake_runtime
from tests.kvbm.store_rig import until

SIZE_BYTES = 10_000
EMBEDDINGS = StoreLayout(
    model="m", weights="w", kv=KvLayout("float32", 1, 1, 1, 1, form="embeddings", form_bytes=SIZE_BYTES)
)
A, B = (bytes([number]) * SIZE_BYTES for number in (1, 2))


@asynccontextmanager
async def serving(
    pool: Path, *, size_bytes: int = 1 << 20, disk: str = "", store_time_s: float = 10.0
) -> AsyncIterator[KvbmService]:
    broker, store = MemoryBroker(), MemoryStore()
    async with fake_runtime("test", "kvbm", "k1", MemoryBus(broker), broker, store) as runtime:
        config = PoolConfig(directory=str(pool), size_bytes=size_bytes, prefault_threads=1)
        tier = DiskConfig(directory=disk, limit_bytes=64 << 20) if disk else DiskConfig()
        limits = TicketLimits(store_time_s=store_time_s)
        asked = KvbmConfig(namespace="test", pool=config, disk=tier, tickets=limits)
        async with kvbm(runtime, asked) as served:
            await until(lambda: served.prefault.complete)
            yield served


def unexpected() -> bytes:
    raise AssertionError("it is encoded again")


async def test_what_one_engine_has_encoded_another_one_finds_and_no_other_image(tmp_path: Path) -> None:
    async with serving(tmp_path / "pool") as served:
        one, two = (KvbmEmbeddings(tmp_path / "pool", worker, EMBEDDINGS) for worker in ("w1", "w2"))
        assert await asyncio.to_thread(one.fetch_or_encode, b"a" * 32, lambda: A) == (A, False)
        assert await asyncio.to_thread(two.fetch_or_encode, b"a" * 32, unexpected) == (A, True)
        assert await asyncio.to_thread(two.fetch_or_encode, b"b" * 32, lambda: B) == (B, False)
        assert await asyncio.to_thread(one.fetch_or_encode, b"b" * 32, unexpected) == (B, True)
        served.layouts.validate()
        [layout] = served.layouts.open.values()
        statistics = layout.tickets.statistics()
        assert (statistics.stores, statistics.fetches) == (0, 0), "no ticket stays"


async def test_of_engines_that_need_an_image_at_the_same_time_one_encodes_it_and_the_other_waits(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path / "pool") as served:
        one, two = (KvbmEmbeddings(tmp_path / "pool", worker, EMBEDDINGS) for worker in ("w1", "w2"))
        two._await_s = 30.0
        begun, go_on = threading.Event(), threading.Event()

        def encode() -> bytes:
            begun.set()
            assert go_on.wait(30)
            return A

        first = asyncio.create_task(asyncio.to_thread(one.fetch_or_encode, b"a" * 32, encode))
        assert await asyncio.to_thread(begun.wait, 30)
        second = asyncio.create_task(asyncio.to_thread(two.fetch_or_encode, b"a" * 32, unexpected))
        await until(lambda: any(layout.tickets.statistics().fetches for layout in served.layouts.open.values()))
        go_on.set()
        assert await first == (A, False)
        assert await second == (A, True)
        served.layouts.validate()


async def test_an_engine_encodes_what_another_one_does_not_bring_in_time(tmp_path: Path) -> None:
    async with serving(tmp_path / "pool") as served:
        one, two = (KvbmEmbeddings(tmp_path / "pool", worker, EMBEDDINGS) for worker in ("w1", "w2"))
        two._await_s = 0.05

        def encode_for_long() -> bytes:
            assert two.fetch_or_encode(b"a" * 32, lambda: A) == (A, False), "it waits in vain, then encodes"
            return A

        assert await asyncio.to_thread(one.fetch_or_encode, b"a" * 32, encode_for_long) == (A, False)
        assert await asyncio.to_thread(two.fetch_or_encode, b"a" * 32, unexpected) == (A, True)
        served.layouts.validate()


async def test_an_engine_that_waited_in_vain_stores_what_the_other_one_gave_up(tmp_path: Path) -> None:
    async with serving(tmp_path / "pool") as served:
        one, two, three = (KvbmEmbeddings(tmp_path / "pool", worker, EMBEDDINGS, 30.0) for worker in ("w1", "w2", "w3"))
        two._await_s = 0.05
        claimed, waited, given_up = threading.Event(), threading.Event(), threading.Event()

        def fail() -> bytes:
            claimed.set()
            assert waited.wait(30)
            raise RuntimeError("no memory")

        def encode() -> bytes:
            waited.set()
            assert given_up.wait(30)
            return A

        first = asyncio.create_task(asyncio.to_thread(one.fetch_or_encode, b"a" * 32, fail))
        assert await asyncio.to_thread(claimed.wait, 30)
        second = asyncio.create_task(asyncio.to_thread(two.fetch_or_encode, b"a" * 32, encode))
        with pytest.raises(RuntimeError, match="no memory"):
            await first
        given_up.set()
        assert await second == (A, False)
        assert await asyncio.to_thread(three.fetch_or_encode, b"a" * 32, unexpected) == (A, True)
        served.layouts.validate()


async def test_an_image_that_takes_longer_to_encode_than_kvbm_keeps_a_slot_is_stored_all_the_same(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path / "pool", store_time_s=1.0) as served:
        one, two = (KvbmEmbeddings(tmp_path / "pool", worker, EMBEDDINGS) for worker in ("w1", "w2"))

        def encode_until_the_slot_is_lost() -> bytes:
            deadline_s = time.monotonic() + 30
            while time.monotonic() < deadline_s:
                if any(layout.tickets.statistics().expired for layout in served.layouts.open.values()):
                    return A
                time.sleep(0.01)
            raise AssertionError("the slot is not taken back")

        assert await asyncio.to_thread(one.fetch_or_encode, b"a" * 32, encode_until_the_slot_is_lost) == (A, False)
        assert await asyncio.to_thread(two.fetch_or_encode, b"a" * 32, unexpected) == (A, True)


async def test_an_image_that_cannot_be_encoded_is_encoded_by_the_next_engine_at_once(tmp_path: Path) -> None:
    def broken() -> bytes:
        raise RuntimeError("no memory")

    async with serving(tmp_path / "pool"):
        one, two = (KvbmEmbeddings(tmp_path / "pool", worker, EMBEDDINGS) for worker in ("w1", "w2"))
        with pytest.raises(RuntimeError, match="no memory"):
            await asyncio.to_thread(one.fetch_or_encode, b"a" * 32, broken)
        assert await asyncio.to_thread(two.fetch_or_encode, b"a" * 32, lambda: A) == (A, False)
        assert await asyncio.to_thread(one.fetch_or_encode, b"a" * 32, unexpected) == (A, True)


async def test_the_least_used_embeddings_give_way_as_blocks_do(tmp_path: Path) -> None:
    async with serving(tmp_path / "pool", size_bytes=128 << 10) as served:
        store = KvbmEmbeddings(tmp_path / "pool", "w1", EMBEDDINGS)
        for number in range(20):
            found, _ = await asyncio.to_thread(store.fetch_or_encode, bytes([number]) * 32, lambda: A)
            assert found == A
        [layout] = served.layouts.open.values()
        assert 0 < layout.tiers.statistics().host.ready <= layout.slots.arena.slots < 20


async def test_embeddings_come_from_disk_once_a_new_kvbm_has_looked_what_is_there(tmp_path: Path) -> None:
    store, disk = KvbmEmbeddings(tmp_path / "pool", "w1", EMBEDDINGS), str(tmp_path / "disk")

    def on_disk(served: KvbmService) -> int:
        return sum(layout.tiers.statistics().disk.ready for layout in served.layouts.open.values())

    async with serving(tmp_path / "pool", disk=disk) as served:
        await asyncio.to_thread(store.fetch_or_encode, b"a" * 32, lambda: A)
        await until(lambda: on_disk(served) == 1)
    async with serving(tmp_path / "pool", disk=disk) as served:
        await asyncio.to_thread(store.fetch_or_encode, b"b" * 32, lambda: B)
        await until(lambda: on_disk(served) >= 1)
        assert await asyncio.to_thread(store.fetch_or_encode, b"a" * 32, unexpected) == (A, True)


async def test_without_a_kvbm_images_are_encoded_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_store, "REFUSED_S", 0.0)
    store = KvbmEmbeddings(tmp_path / "pool", "w1", EMBEDDINGS)
    for _ in range(3):
        assert store.fetch_or_encode(b"a" * 32, lambda: A) == (A, False)
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "embeddings of images are not kept in the kvbm (kvbm.embeddings): there is no" in said
    async with serving(tmp_path / "pool"):
        await asyncio.to_thread(store.fetch_or_encode, b"a" * 32, lambda: A)
        assert await asyncio.to_thread(store.fetch_or_encode, b"a" * 32, unexpected) == (A, True)


async def test_what_was_encoded_while_kvbm_was_away_is_stored_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_store, "REFUSED_S", 0.0)
    monkeypatch.setattr(embedding_store, "OWED_LIMIT", 2)
    one, two = (KvbmEmbeddings(tmp_path / "pool", worker, EMBEDDINGS) for worker in ("w1", "w2"))
    for name in (b"x", b"a", b"b"):
        one.fetch_or_encode(name * 32, lambda: A)
    one.store_owed()
    async with serving(tmp_path / "pool") as served:
        assert await asyncio.to_thread(two.fetch_or_encode, b"b" * 32, lambda: B) == (B, False)
        for _ in range(3):
            await asyncio.to_thread(one.store_owed)
        assert await asyncio.to_thread(two.fetch_or_encode, b"a" * 32, unexpected) == (A, True)
        assert await asyncio.to_thread(two.fetch_or_encode, b"b" * 32, unexpected) == (B, True), "the first that came"
        assert await asyncio.to_thread(two.fetch_or_encode, b"x" * 32, lambda: B) == (B, False), "one too many was owed"
        served.layouts.validate()
        [layout] = served.layouts.open.values()
        assert (layout.tickets.statistics().stores, layout.tickets.statistics().fetches) == (0, 0), "no ticket stays"


async def test_a_kvbm_that_ends_while_an_image_is_encoded_has_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_store, "REFUSED_S", 0.0)
    one, two = (KvbmEmbeddings(tmp_path / "pool", worker, EMBEDDINGS) for worker in ("w1", "w2"))
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(serving(tmp_path / "pool"))
        encoded, go_on = threading.Event(), threading.Event()

        def encode() -> bytes:
            encoded.set()
            assert go_on.wait(30)
            return A

        encoding = asyncio.create_task(asyncio.to_thread(one.fetch_or_encode, b"a" * 32, encode))
        assert await asyncio.to_thread(encoded.wait, 30)
        await opened.aclose()
        go_on.set()
        assert await encoding == (A, False)
    async with serving(tmp_path / "pool"):
        await asyncio.to_thread(one.store_owed)
        assert await asyncio.to_thread(two.fetch_or_encode, b"a" * 32, unexpected) == (A, True)


async def test_without_an_arena_of_their_own_embeddings_are_not_kept_and_blocks_keep_theirs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path / "pool") as served:
        blocks = StoreLayout(model="m", weights="w", kv=KvLayout("float32", 1, 1, 1, 16))
        other = KvbmEmbeddings(tmp_path / "pool", "w1", blocks)
        store = KvbmEmbeddings(tmp_path / "pool", "w2", EMBEDDINGS)

        def encode_meanwhile() -> bytes:
            assert store.fetch_or_encode(b"a" * 32, lambda: A) == (A, False)
            return bytes(blocks.kv.block_bytes)

        await asyncio.to_thread(other.fetch_or_encode, b"x" * 32, encode_meanwhile)
        assert [layout.layout for layout in served.layouts.open.values()] == [blocks]
    assert "all 1 arenas of the pool are in use" in caplog.text


def test_a_kvbm_that_says_nothing_is_not_waited_for_again_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_store, "WAIT_S", 0.05)
    monkeypatch.setattr(embedding_store, "REFUSED_S", 0.0)
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / SOCKET))
        silent.listen()
        store = KvbmEmbeddings(tmp_path, "w1", EMBEDDINGS)
        assert store.fetch_or_encode(b"a" * 32, lambda: A) == (A, False)
        silent.accept()[0].close()
        silent.settimeout(0.0)
        assert store.fetch_or_encode(b"a" * 32, lambda: A) == (A, False)
        with pytest.raises(BlockingIOError):
            silent.accept()
