"""Workers of a tiny LLaVA, their real engine processes and a real kvbm: transformers' tokens, from caches, after kills,
and from a worker that only encodes. The same tests run on a GPU."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from services.worker.config import CudaConfig, KVConnectorConfig, WorkerConfig
from services.worker.requests import image_orders
from shared.errors import ModelError
from shared.hashing import content_keys, event_hash, image_extras, pack_tokens, root_key, unpack_tokens
from shared.messages.cards import ImageInput
from shared.messages.encode import ENCODE, ENCODED, Encode
from shared.messages.frames import Part
from shared.messages.generate import Generate, Image, Refused, Sampling
from shared.messages.kv_events import BlockStored
from shared.messages.load import EncoderState
from tests.integration.kinds import CPU, GPU, Kind, params
from tests.tiny_model import IMAGE_TOKEN, write_tiny_model
from tests.worker.native.golden.cases import (
    ANSWER_TOKENS,
    CASES,
    GOLDEN,
    IMAGE_STARTS,
    LLAVAS,
    image_pixels,
    image_prompt,
)
from tests.worker.shell import NAMESPACE, WORKER, Shell, request, running_worker
from tests.worker.store import attached, saved, store

BLOCK_SIZE = 8
BLOCKS = 7
"""Full ones of the prompt."""
PROMPT = image_prompt(16)
GREEDY = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)


def image(number: int, start: int) -> Image:
    pixels = image_pixels(28, number).tobytes()
    return Image(hashlib.sha256(pixels).digest(), start, 16, pixels)


IMAGES = tuple(image(number, start) for number, start in enumerate(IMAGE_STARTS))


@pytest.fixture(scope="module", params=params((CPU[0], GPU[0])))
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture
def config(tmp_path: Path, kind: Kind) -> Iterator[WorkerConfig]:
    with kind.pool(tmp_path) as pool:
        yield WorkerConfig(
            namespace=NAMESPACE,
            model=str(write_tiny_model(tmp_path / "model", **CASES[LLAVAS[0]])),
            cache=str(tmp_path / "cache"),
            engine="native",
            device=kind.device,
            cuda=CudaConfig(dtype=kind.dtype),
            block_size=BLOCK_SIZE,
            capacity_blocks=64,
            threads=1,
            drain_s=1.0,
            kvbm=KVConnectorConfig(pool=str(pool), wait_s=20.0, timeout_s=4.0),
        )


@pytest.fixture
def expected() -> list[int]:
    with np.load(GOLDEN / "llava.npz") as golden:
        return [int(token) for token in golden[f"{LLAVAS[0]}: output"]]


def asked(name: str, images: tuple[Image, ...] = IMAGES, **fields: object) -> Generate:
    return msgspec.structs.replace(request(name, PROMPT, sampling=GREEDY, images=images), **fields)


async def answer(shell: Shell, generate: Generate) -> tuple[list[int], Part]:
    """Return the tokens, and the last part."""
    await shell.peer.generate(generate)
    assert await shell.peer.ended(generate.request) == "length"
    return shell.peer.tokens(generate.request), shell.peer.parts(generate.request)[-1]


def counted(shell: Shell, outcome: str) -> float:
    return shell.runtime.registry.get_sample_value("headrace_images_total", {"outcome": outcome}) or 0


async def kill_engine(shell: Shell) -> None:
    assert shell.worker.engine.pid is not None
    os.kill(shell.worker.engine.pid, signal.SIGKILL)
    await shell.peer.until(lambda: ("model", WORKER) not in shell.directory.cards)


async def test_images_over_the_wire_give_transformers_answer_from_the_cache_from_kvbm_and_after_a_kill(
    config: WorkerConfig, expected: list[int]
) -> None:
    async with running_worker(config) as shell, store(shell, config.kvbm.pool, "k1"):
        await attached(shell, "k1")
        assert shell.directory.cards["model", WORKER].images == ImageInput(IMAGE_TOKEN, 16, 28, 28, 28, "BICUBIC")
        assert (await answer(shell, asked("first")))[0] == expected
        again, part = await answer(shell, asked("again"))
        assert (again, part.cached_tokens) == (expected, BLOCKS * BLOCK_SIZE)
        await shell.peer.until(lambda: counted(shell, "encoded") == 2)
        await saved(shell, BLOCKS)
        await kill_engine(shell)
        await attached(shell, "k1")
        after, part = await answer(shell, asked("after"))
        assert (after, part.cached_host_tokens) == (expected, BLOCKS * BLOCK_SIZE)
        other, part = await answer(shell, asked("other", (IMAGES[0], image(2, IMAGE_STARTS[1]))))
        assert other != expected
        assert part.cached_tokens == IMAGE_STARTS[1] // BLOCK_SIZE * BLOCK_SIZE, "the blocks of two pictures differ"
        await shell.peer.until(lambda: counted(shell, "encoded") == 3)
        await shell.peer.until(lambda: any(report.encoder is not None for report in shell.peer.reports))


async def test_events_name_the_images_of_blocks_as_routers_hash_them(config: WorkerConfig) -> None:
    async with running_worker(config) as shell:
        await shell.peer.until(lambda: ("model", WORKER) in shell.directory.cards)
        await answer(shell, asked("first"))
        named = [(each.key, each.start, each.tokens) for each in IMAGES]
        extras = image_extras(named, BLOCK_SIZE)
        keys = content_keys(root_key("model"), pack_tokens(PROMPT), BLOCK_SIZE, extras)
        events = [event for _, batch in shell.peer.batches for event in batch.events if isinstance(event, BlockStored)]
        extra_of = {
            name: extra
            for event in events
            for name, extra in zip(
                event.block_hashes, event.extra_keys or [None] * len(event.block_hashes), strict=True
            )
        }
        for number, key in enumerate(keys):
            found = extra_of[event_hash(key)] or []
            assert len(found) == len(extras.get(number, b"")) // 36
        assert extra_of[event_hash(keys[0])] == [[IMAGES[0].key.hex(), IMAGE_STARTS[0]]]


async def test_what_a_prefill_worker_hands_over_goes_on_in_another_engine(
    config: WorkerConfig, expected: list[int]
) -> None:
    config = msgspec.structs.replace(config, role="prefill")
    async with running_worker(config) as shell, store(shell, config.kvbm.pool, "k1"):
        await attached(shell, "k1")
        await shell.peer.generate(asked("p", prefill_only=True))
        assert await shell.peer.ended("p") == "handed_over"
        assert shell.peer.tokens("p") == expected[:1]
        await saved(shell, BLOCKS)
        await kill_engine(shell)
        await attached(shell, "k1")
        await shell.peer.generate(asked("q", tokens=pack_tokens([*PROMPT, *expected[:1]])))
        await shell.peer.until(lambda: any(part.finish for part in shell.peer.parts("q")))
        parts = shell.peer.parts("q")
        assert [token for part in parts for token in unpack_tokens(part.tokens)] == expected[1:]
        assert (parts[0].first, parts[-1].cached_host_tokens) == (1, BLOCKS * BLOCK_SIZE)
        heard = len(shell.peer.reports)
        await shell.peer.until(lambda: len(shell.peer.reports) > heard + 1)
        assert shell.peer.reports[-1].encoder is None, "the second engine computed no image's token"


async def test_an_image_for_a_model_that_takes_none_is_refused(config: WorkerConfig) -> None:
    async with running_worker(msgspec.structs.replace(config, most_images=0)) as shell:
        await shell.peer.until(lambda: ("model", WORKER) in shell.directory.cards)
        assert shell.directory.cards["model", WORKER].images is None
        reply = await shell.peer.generate(asked("first"))
        assert isinstance(reply, Refused)
        assert reply.reason == "images: this engine takes none"


async def test_a_killed_engine_encodes_no_image_again_whose_embeddings_are_in_kvbm(
    config: WorkerConfig, expected: list[int]
) -> None:
    link = msgspec.structs.replace(config.kvbm, embeddings=True, offload="off")
    config = msgspec.structs.replace(config, kvbm=link)
    async with running_worker(config) as shell, store(shell, config.kvbm.pool, "k1", arenas=2):
        await attached(shell, "k1")
        assert (await answer(shell, asked("first")))[0] == expected
        await shell.peer.until(lambda: counted(shell, "encoded") == 2)
        await kill_engine(shell)
        await attached(shell, "k1")
        again, part = await answer(shell, asked("again"))
        assert (again, part.cached_tokens) == (expected, 0)
        await shell.peer.until(lambda: counted(shell, "kvbm") == 2)
        assert counted(shell, "encoded") == 2


# --- a worker that only encodes


@pytest.fixture
def encodes(config: WorkerConfig) -> WorkerConfig:
    link = msgspec.structs.replace(config.kvbm, embeddings=True)
    return msgspec.structs.replace(config, role="encode", kvbm=link)


async def order(shell: Shell, encode: Encode) -> str:
    """Return why an image was not encoded. Empty if it was."""
    return ENCODED.decode((await shell.peer.ask("encode", ENCODE.encode(encode))).payload).failed


def encoder_of(shell: Shell) -> EncoderState:
    """Return what the worker last reported of its encoder."""
    found = shell.peer.reports[-1].encoder if shell.peer.reports else None
    return found or EncoderState(0, 0, 0, 0)


def orders() -> list[Encode]:
    return [Encode("model", each.key, each.pixels, 60.0) for each in IMAGES]


async def test_what_an_encode_worker_leaves_in_the_kvbm_another_worker_computes_the_same_tokens_from(
    encodes: WorkerConfig, expected: list[int]
) -> None:
    async with running_worker(encodes) as shell, store(shell, encodes.kvbm.pool, "k1", arenas=2):
        await attached(shell, "k1")
        card = shell.directory.cards["model", WORKER]
        assert (card.role, card.decodes, card.capacity_blocks) == ("encode", False, 0)
        assert card.embeddings_layout
        assert [await order(shell, each) for each in orders()] == ["", ""]
        assert [await order(shell, each) for each in orders()] == ["", ""], "they are there already"
        await shell.peer.until(lambda: encoder_of(shell).fetched == 2)
        encoder = encoder_of(shell)
        assert (encoder.encoded, encoder.waiting, encoder.image_s > 0) == (2, 0, True)
        answering = msgspec.structs.replace(encodes, role="aggregated")
        async with running_worker(answering) as other:
            await attached(other, "k1")
            assert (await answer(other, asked("first")))[0] == expected
            await other.peer.until(lambda: counted(other, "kvbm") == 2)
            assert counted(other, "encoded") == 0
            salted = asked("salted", salt="another tenant's")
            assert (await answer(other, salted))[0] == expected
            await other.peer.until(lambda: counted(other, "encoded") == 2)


async def test_embeddings_that_are_evicted_before_their_request_comes_are_encoded_in_place(
    encodes: WorkerConfig, expected: list[int]
) -> None:
    async with running_worker(encodes) as shell, store(shell, encodes.kvbm.pool, "k1", arenas=2, size_bytes=1 << 18):
        await attached(shell, "k1")
        assert [await order(shell, each) for each in orders()] == ["", ""]
        for number in range(10, 80):
            other = image(number, 0)
            assert await order(shell, Encode("model", other.key, other.pixels, 60.0)) == ""
        answering = msgspec.structs.replace(encodes, role="aggregated")
        async with running_worker(answering) as answers:
            await attached(answers, "k1")
            assert (await answer(answers, asked("first")))[0] == expected
            await answers.peer.until(lambda: counted(answers, "encoded") == 2)


async def test_an_order_that_makes_no_sense_or_comes_to_another_worker_is_refused_by_name(
    encodes: WorkerConfig, config: WorkerConfig
) -> None:
    first, _ = orders()
    wrong: dict[str, dict[str, Any]] = {
        "model: other; this worker serves model": {"model": "other"},
        "key: 3 bytes, not 32": {"key": b"key"},
        "pixels: 4 bytes, not 2352": {"pixels": b"four"},
        "time_left_s: 0; it is above 0, and 60 at most": {"time_left_s": 0.0},
        "time_left_s: nan; it is above 0, and 60 at most": {"time_left_s": float("nan")},
    }
    async with running_worker(encodes) as shell, store(shell, encodes.kvbm.pool, "k1", arenas=2):
        await attached(shell, "k1")
        for why, fields in wrong.items():
            assert await order(shell, msgspec.structs.replace(first, **fields)) == why
        reply = await shell.peer.ask("encode", b"\xc1")
        assert ENCODED.decode(reply.payload).failed.startswith("encode: ")
    async with running_worker(config) as shell:
        await shell.peer.until(lambda: ("model", WORKER) in shell.directory.cards)
        assert await order(shell, first) == "this worker does not have the role encode"


async def test_orders_of_an_engine_that_is_killed_end_and_the_next_one_takes_orders(encodes: WorkerConfig) -> None:
    first, second = orders()
    async with running_worker(encodes) as shell, store(shell, encodes.kvbm.pool, "k1", arenas=2):
        await attached(shell, "k1")
        pid = shell.worker.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.ensure_future(order(shell, first))
        await shell.peer.until(lambda: shell.worker.engine.encoding == 1)
        os.kill(pid, signal.SIGKILL)
        assert await waiting == "the engine is lost"
        await shell.peer.until(lambda: ("model", WORKER) not in shell.directory.cards)
        assert await order(shell, first) == "this worker takes no orders now"
        await attached(shell, "k1")
        assert await order(shell, second) == ""


async def test_no_more_orders_are_taken_than_the_limit(encodes: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_orders, "MOST_ORDERS", 1)
    first, second = orders()
    async with running_worker(encodes) as shell, store(shell, encodes.kvbm.pool, "k1", arenas=2):
        await attached(shell, "k1")
        pid = shell.worker.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.ensure_future(order(shell, first))
        await shell.peer.until(lambda: shell.worker.engine.encoding == 1)
        assert await order(shell, second) == "1 images wait already"
        os.kill(pid, signal.SIGCONT)
        assert await waiting == ""


async def test_an_engine_that_sleeps_encodes_nothing_and_one_that_stops_ends_its_orders_first(
    encodes: WorkerConfig,
) -> None:
    first, second = orders()
    encodes = msgspec.structs.replace(encodes, drain_s=60.0)
    async with running_worker(encodes) as shell, store(shell, encodes.kvbm.pool, "k1", arenas=2):
        await attached(shell, "k1")
        assert await shell.worker.engine.operate("sleep", 60.0) == ""
        assert await order(shell, first) == "the engine is asleep"
        assert await shell.worker.engine.operate("wake", 60.0) == ""
        pid = shell.worker.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.ensure_future(order(shell, second))
        await shell.peer.until(lambda: shell.worker.engine.encoding == 1)
        shell.runtime.stopping.set()
        await shell.peer.until(lambda: shell.worker._attempts.draining)
        assert await order(shell, first) == "this worker takes no orders now"
        os.kill(pid, signal.SIGCONT)
        assert await waiting == ""


async def test_a_model_that_takes_no_images_has_no_encode_workers(encodes: WorkerConfig, tmp_path: Path) -> None:
    text = msgspec.structs.replace(encodes, model=str(write_tiny_model(tmp_path / "text")))
    with pytest.raises(ExceptionGroup) as ended:
        async with running_worker(text) as shell:
            await shell.peer.until(lambda: False)
    [wrong] = ended.value.exceptions
    assert isinstance(wrong, ModelError)
    assert str(wrong).startswith("role is encode, but the model takes no images")
