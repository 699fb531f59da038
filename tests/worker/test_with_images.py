"""A worker of a tiny LLaVA, its real engine process and a real kvbm: transformers' tokens, from caches and after
kills."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.worker.config import KVConnectorConfig, WorkerConfig
from shared.hashing import content_keys, event_hash, image_extras, pack_tokens, root_key, unpack_tokens
from shared.messages.cards import ImageInput
from shared.messages.frames import Part
from shared.messages.generate import Generate, Image, Refused, Sampling
from shared.messages.kv_events import BlockStored
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


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(
        namespace=NAMESPACE,
        model=str(write_tiny_model(tmp_path / "model", **CASES[LLAVAS[0]])),
        cache=str(tmp_path / "cache"),
        engine="native",
        block_size=BLOCK_SIZE,
        capacity_blocks=64,
        threads=1,
        drain_s=1.0,
        kvbm=KVConnectorConfig(pool=str(tmp_path / "pool"), wait_s=20.0, timeout_s=4.0),
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
