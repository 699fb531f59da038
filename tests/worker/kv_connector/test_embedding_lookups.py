"""Embeddings of images are looked up in a real kvbm while a loop goes on, and each look-up has one answer."""

from __future__ import annotations

import asyncio
import select
from pathlib import Path

import numpy as np
import pytest

from services.worker.kv_connector import embedding_lookups
from services.worker.kv_connector.embedding_lookups import ThreadedLookups, is_finite
from services.worker.kv_connector.embedding_store import KvbmEmbeddings
from tests.kvbm.store_rig import until
from tests.worker.kv_connector.test_embedding_store import EMBEDDINGS, A, B, serving, unexpected

KEY, OTHER = b"a" * 32, b"b" * 32


def lookups(pool: Path, worker: str = "w1") -> ThreadedLookups:
    return ThreadedLookups(lambda: KvbmEmbeddings(pool, worker, EMBEDDINGS))


async def found(asked: ThreadedLookups, key: bytes) -> bytes | None:
    """Look an image up, as an engine's loop does."""
    asked.look_up(key)
    assert (await asyncio.to_thread(select.select, [asked], [], [], 60))[0], "no answer"
    [(answered, embeddings)] = asked.take_found()
    assert answered == key
    return embeddings


async def test_what_one_engine_has_encoded_is_found_by_another_one_which_waits_for_it(tmp_path: Path) -> None:
    async with serving(tmp_path / "pool") as served:
        one, two = lookups(tmp_path / "pool"), lookups(tmp_path / "pool", "w2")
        assert await found(one, KEY) is None, "it is to encode the image"
        waiting = asyncio.ensure_future(found(two, KEY))
        await until(lambda: any(layout.tickets.statistics().fetches for layout in served.layouts.open.values()))
        one.keep(KEY, A)
        assert await waiting == A
        assert await found(one, KEY) == A
        [layout] = served.layouts.open.values()

        def tickets() -> tuple[int, int]:
            statistics = layout.tickets.statistics()
            return statistics.stores, statistics.fetches

        await until(lambda: tickets() == (0, 0))
        served.layouts.validate()
        one.close()
        two.close()


async def test_a_slot_for_an_image_that_is_never_encoded_is_given_back_and_a_later_one_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_lookups, "CLAIM_S", 0.05)
    async with serving(tmp_path / "pool") as served:
        one, two = lookups(tmp_path / "pool"), KvbmEmbeddings(tmp_path / "pool", "w2", EMBEDDINGS)
        assert await found(one, KEY) is None
        await until(lambda: [layout.tickets.statistics().stores for layout in served.layouts.open.values()] == [0])
        assert await asyncio.to_thread(two.fetch_or_encode, KEY, lambda: A) == (A, False)
        one.keep(OTHER, B)
        await until(lambda: sum(each.tiers.statistics().host.ready for each in served.layouts.open.values()) == 2)
        assert await asyncio.to_thread(two.fetch_or_encode, OTHER, unexpected) == (B, True)
        one.close()


async def test_an_image_that_is_given_up_is_encoded_by_the_next_engine_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_lookups, "CLAIM_S", 3600.0)
    async with serving(tmp_path / "pool") as served:
        one, two = lookups(tmp_path / "pool"), lookups(tmp_path / "pool", "w2")
        assert await found(one, KEY) is None
        one.give_up(KEY)
        await until(lambda: [layout.tickets.statistics().stores for layout in served.layouts.open.values()] == [0])
        assert await found(two, KEY) is None
        two.keep(KEY, A)
        one.give_up(KEY)
        await until(lambda: sum(each.tiers.statistics().host.ready for each in served.layouts.open.values()) == 1)
        assert await found(one, KEY) == A
        one.close()
        two.close()


async def test_of_two_look_ups_of_an_image_without_a_kvbm_both_end_and_one_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_lookups, "OWED_S", 0.05)
    monkeypatch.setattr(embedding_lookups, "THREADS", 2)
    one = lookups(tmp_path / "pool")
    assert await found(one, KEY) is None
    assert await found(one, KEY) is None
    one.keep(KEY, A)
    for _ in range(2):
        assert await found(one, OTHER) is None, "both threads are free again"
    async with serving(tmp_path / "pool") as served:
        await until(lambda: sum(each.tiers.statistics().host.ready for each in served.layouts.open.values()) == 1)
    one.close()


async def test_what_was_encoded_without_a_kvbm_is_stored_once_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_lookups, "OWED_S", 0.05)
    one = lookups(tmp_path / "pool")
    assert await found(one, KEY) is None
    one.keep(KEY, A)
    async with serving(tmp_path / "pool") as served:
        await until(lambda: sum(each.tiers.statistics().host.ready for each in served.layouts.open.values()) == 1)
        assert await found(one, KEY) == A
    one.close()


async def test_embeddings_beyond_the_limit_of_jobs_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_lookups, "MOST_JOBS", 0)
    async with serving(tmp_path / "pool"):
        one = lookups(tmp_path / "pool")
        one.keep(KEY, A)
        assert await found(one, KEY) is None
        one.close()


def test_the_descriptor_is_readable_while_there_are_answers_and_only_then(tmp_path: Path) -> None:
    asked = lookups(tmp_path / "pool")
    keys = [number.to_bytes(32, "big") for number in range(embedding_lookups.THREADS)]
    answered: list[bytes] = []
    for key in keys:
        asked.look_up(key)
    while len(answered) < len(keys):
        assert select.select([asked], [], [], 60)[0], "no answer"
        taken = asked.take_found()
        assert taken, "it is readable, and there is nothing: the engine would spin"
        for key, embeddings in taken:
            assert embeddings is None
            asked.keep(key, A)
            answered.append(key)
    assert sorted(answered) == keys
    assert select.select([asked], [], [], 0.0)[0] == []
    assert asked.take_found() == []
    asked.close()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_whether_numbers_are_finite_is_seen_in_numpys_types(dtype: str) -> None:
    assert is_finite(np.array([1, -2], dtype).tobytes(), dtype)
    for bad in (np.inf, -np.inf, np.nan):
        assert not is_finite(np.array([1, bad], dtype).tobytes(), dtype)


def test_whether_numbers_are_finite_is_seen_in_bfloat16() -> None:
    assert is_finite(np.array([0x3F80, 0xFF7F], np.uint16).tobytes(), "bfloat16"), "1, and the least number"
    for bad in (0x7F80, 0xFF80, 0x7FC0):
        assert not is_finite(np.array([0x3F80, bad], np.uint16).tobytes(), "bfloat16")
