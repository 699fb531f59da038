"""services/worker/vllm/encoder_cache/exchange.py: images go to a real kvbm and come from there, and if there is none
the answer is to encode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from services.worker.kv_connector import embedding_store
from services.worker.kv_connector.embedding_store import KvbmEmbeddings
from services.worker.vllm.encoder_cache.exchange import EmbeddingExchange, is_finite
from services.worker.vllm.encoder_cache.wanted import ImageQuestion
from shared.messages.cards import KvLayout
from shared.messages.kvbm import StoreLayout
from tests.kvbm.store_rig import Store, settings, until
from tests.kvbm.store_rig import serving as serving_now

SIZE_BYTES = 4000
A, B = (np.full(SIZE_BYTES // 4, number, np.float32).tobytes() for number in (1, 2))
BAD = np.full(SIZE_BYTES // 4, np.nan, np.float32).tobytes()


def layout(dtype: str = "float32", size_bytes: int = SIZE_BYTES, model: str = "m") -> StoreLayout:
    return StoreLayout(model, "w", KvLayout(dtype, 1, 1, 1, 1, form="embeddings", form_bytes=size_bytes))


def exchange(directory: Path, of: StoreLayout | None = None, most: int = 4) -> EmbeddingExchange:
    used, pool = of or layout(), directory / "pool"
    return EmbeddingExchange(lambda: KvbmEmbeddings(pool, "w1", used, 4.0), used.kv.dtype, most)


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Store]:
    """Run a kvbm whose pool is made."""
    async with serving_now(directory, pool=settings(directory).pool) as store:
        await until(lambda: store.service.prefault.complete)
        yield store


class Asking:
    """One engine's questions, and their answers."""

    def __init__(self, exchange: EmbeddingExchange) -> None:
        self.exchange = exchange
        self.answers: dict[int, bytes] = {}
        self.number = 0

    async def ask(self, key: bytes, embeddings: bytes = b"") -> bytes:
        """Return the answer; if it is to encode, these are the embeddings, and without any it is given up."""
        self.number += 1
        self.exchange.ask(ImageQuestion(self.number, key))
        answer = await self.answered(self.number)
        if not answer:
            self.exchange.deliver(self.number, embeddings)
        return answer

    async def answered(self, number: int) -> bytes:
        def met() -> bool:
            self.answers.update(self.exchange.answers())
            return number in self.answers

        await until(met)
        return self.answers[number]

    async def ended(self) -> None:
        """Wait until no thread is left."""

        def met() -> bool:
            self.exchange._tidy()
            return not self.exchange._threads

        await until(met)


async def test_what_one_engine_has_encoded_another_one_gets(tmp_path: Path) -> None:
    async with serving(tmp_path):
        one, two = Asking(exchange(tmp_path)), Asking(exchange(tmp_path))
        assert await one.ask(b"a" * 32, A) == b""
        await one.ended()
        assert await two.ask(b"a" * 32) == A
        assert await two.ask(b"b" * 32, B) == b""
        await two.ended()
        assert await one.ask(b"b" * 32) == B
        await one.ended()


async def test_another_model_type_or_size_gets_nothing_of_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        one = Asking(exchange(tmp_path))
        await one.ask(b"a" * 32, A)
        await one.ended()
        for of in (layout(model="n"), layout("float16"), layout(size_bytes=2 * SIZE_BYTES)):
            other = Asking(exchange(tmp_path, of))
            assert await other.ask(b"a" * 32) == b"", "there is an arena for one layout"
            await other.ended()
        store.service.layouts.validate()


async def test_an_image_that_is_given_up_is_encoded_by_the_next_one_who_needs_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        one, two = Asking(exchange(tmp_path)), Asking(exchange(tmp_path))
        assert await one.ask(b"a" * 32) == b""
        await one.ended()
        assert await two.ask(b"a" * 32, A) == b""
        await two.ended()
        assert await one.ask(b"a" * 32) == A
        await one.ended()
        [layout] = store.service.layouts.open.values()
        statistics = layout.tickets.statistics()
        assert (statistics.stores, statistics.fetches) == (0, 0)


async def test_embeddings_that_are_not_finite_are_encoded(tmp_path: Path) -> None:
    async with serving(tmp_path):
        one = Asking(exchange(tmp_path))
        await one.ask(b"a" * 32, BAD)
        await one.ended()
        assert await one.ask(b"a" * 32) == b""
        await one.ended()


async def test_without_a_kvbm_and_with_too_many_questions_the_answer_is_to_encode(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir(mode=0o700)
    one = Asking(exchange(tmp_path, most=1))
    assert await one.ask(b"a" * 32, A) == b""
    await one.ended()

    async with serving(tmp_path) as store:
        two = Asking(exchange(tmp_path, most=1))
        for number, key in enumerate((b"a", b"b"), 1):
            two.exchange.ask(ImageQuestion(number, key * 32))
        assert await two.answered(2) == b"", "the one question that may be under way is"
        assert await two.answered(1) == b""
        two.exchange.deliver(2, B)
        two.exchange.deliver(1, A)
        await two.ended()
        [kept] = store.service.layouts.open.values()
        assert kept.tiers.statistics().host.ready == 1


async def test_what_was_encoded_without_a_kvbm_is_stored_after_a_later_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_store, "REFUSED_S", 0.0)
    (tmp_path / "pool").mkdir(mode=0o700)
    one, two = Asking(exchange(tmp_path)), Asking(exchange(tmp_path))
    assert await one.ask(b"a" * 32, A) == b""
    await one.ended()
    async with serving(tmp_path):
        assert await one.ask(b"b" * 32, B) == b""
        await one.ended()
        assert await two.ask(b"a" * 32) == A
        await two.ended()


async def test_a_store_that_fails_costs_an_image_its_exchange_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        owes = False

        def store_owed(self) -> None:
            """It owes nothing."""

        def fetch_or_encode(self, key: bytes, encode: Callable[[], bytes]) -> tuple[bytes, bool]:
            raise RuntimeError(f"no {key!r}")

    one = Asking(EmbeddingExchange(Broken, "float32", 2))
    assert await one.ask(b"a") == b""
    await one.ended()
    assert "an image's embeddings are not exchanged: no b'a'" in caplog.text


async def test_an_exchange_that_is_closed_gives_all_up(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        one = Asking(exchange(tmp_path))
        one.exchange.ask(ImageQuestion(1, b"a" * 32))
        assert await one.answered(1) == b""
        one.exchange.close()
        await one.ended()

        def no_ticket() -> bool:
            layouts = store.service.layouts.open.values()
            return not any(each.tickets.statistics().stores for each in layouts)

        await until(no_ticket)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_whether_numbers_are_finite_is_seen_in_numpys_types(dtype: str) -> None:
    assert is_finite(np.array([1, -2], dtype).tobytes(), dtype)
    for bad in (np.inf, -np.inf, np.nan):
        assert not is_finite(np.array([1, bad], dtype).tobytes(), dtype)


def test_whether_numbers_are_finite_is_seen_in_bfloat16() -> None:
    assert is_finite(np.array([0x3F80, 0xFF7F], np.uint16).tobytes(), "bfloat16"), "1, and the least number"
    for bad in (0x7F80, 0xFF80, 0x7FC0):
        assert not is_finite(np.array([0x3F80, bad], np.uint16).tobytes(), "bfloat16")
