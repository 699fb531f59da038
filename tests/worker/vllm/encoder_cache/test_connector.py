"""services/worker/vllm/encoder_cache/connector.py: a tiny LLaVA on a real vLLM with a kvbm. Blocks and embeddings of
images outlive the engine, go to the same pictures alone, and are made in place without a kvbm."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from services.kvbm.config import PoolConfig
from services.kvbm.service import KvbmService
from services.worker.config import WorkerConfig
from services.worker.contracts.messages import Prefetch, Submit
from shared.hashing import pack_tokens
from tests.kvbm.store_rig import serving, settings, until
from tests.worker.engine.driven_engine import DrivenEngine
from tests.worker.vllm.environment import ON_DEVICE, PYTHON, needs_vllm
from tests.worker.vllm.tiny_llava import (
    BLOCK,
    GREEDY,
    HAS_TORCHVISION,
    answers_alone,
    images_of,
    prompt_of,
    write_model,
)

pytestmark = [
    needs_vllm,
    pytest.mark.asyncio,
    pytest.mark.skipif(not HAS_TORCHVISION, reason="vLLM has no torchvision"),
]
FULL = 3
"""The prompts' full blocks without the last token, which is computed always."""


def otherwise(pictures: Sequence[int]) -> list[int]:
    """Return a prompt with the same pictures in the same places, whose text differs from its first token on."""
    return [prompt_of(pictures)[0] + 1, *prompt_of(pictures)[1:]]


@asynccontextmanager
async def engine(model: Path, pool: Path, role: str = "aggregated") -> AsyncIterator[DrivenEngine]:
    arguments = {"num_gpu_blocks_override": 64, "enforce_eager": True, "dtype": "float32", **ON_DEVICE}
    given = {
        **{"model": str(model), "model_name": "eyes", "engine": "vllm", "block_size": BLOCK, "capacity_blocks": 0},
        **{"vllm": arguments, "vllm_python": str(PYTHON), "threads": 1, "role": role},
        "kvbm": {"pool": str(pool), "embeddings": True, "wait_s": 60.0, "timeout_s": 4.0},
    }
    driven = await DrivenEngine.start(msgspec.convert(given, WorkerConfig))
    try:
        yield driven
    finally:
        await driven.close()


async def counted(engine: DrivenEngine, hits: int, encoded: int, fetched: int) -> None:
    """Wait until the engine's load says this of its images."""
    load = engine.load

    def met() -> bool:
        nonlocal load
        load = engine.load
        return (load.encoder_hits, load.encoded_images, load.fetched_images) == (hits, encoded, fetched)

    try:
        await engine.until(met)
    except TimeoutError:
        raise AssertionError(load) from None


def stored(service: KvbmService) -> list[int]:
    """Return how many blocks each layout has, of KV and of embeddings."""
    ready = [layout.tiers.statistics().host.ready for layout in service.layouts.open.values()]
    return sorted(ready, reverse=True)


async def test_blocks_and_embeddings_of_a_killed_engine_go_to_the_same_pictures_alone(tmp_path: Path) -> None:
    model, pool = write_model(tmp_path), settings(tmp_path, size_bytes=64 << 20).pool
    asked = [(prompt_of([0]), [0]), (prompt_of([1]), [1]), (otherwise([0]), [0]), (otherwise([1]), [1])]
    asked.append((prompt_of([2]), [2]))
    alone = answers_alone(model, asked)
    assert len({tuple(answer) for answer in alone[:2]}) == 2, "the pictures make no difference"
    directory = Path(pool.directory)

    async def answer(engine: DrivenEngine, number: int, salt: str = "") -> int:
        """Compare an answer with vLLM's alone; return how many tokens of the prompt were not computed."""
        tokens, pictures = asked[number]
        name = f"{number}{salt}"
        assert await engine.answer(name, tokens, GREEDY, images=images_of(pictures), salt=salt) == alone[number], name
        return engine.parts[name][-1].cached_tokens

    kept = PoolConfig(directory=pool.directory, size_bytes=pool.size_bytes, arenas=2)
    async with AsyncExitStack() as opened:
        store = await opened.enter_async_context(serving(tmp_path, pool=kept))
        async with engine(model, directory) as one:
            assert await answer(one, 0) == 0
            assert await answer(one, 1) == 0, "another picture of the same size in the same place"
            await counted(one, 0, 2, 0)
            assert (one.load.encoder_entries, one.load.encoder_bytes > 0) == (2, True)
            await until(lambda: len(stored(store.service)) == 2 and stored(store.service)[1] == 2)
            await until(lambda: stored(store.service)[0] >= 2 * FULL)
            first = {"images": images_of([0]), "prefill_only": True}
            assert await one.answer("handed over", prompt_of([0]), GREEDY, **first) == alone[0][:1]
            os.kill(one.process.pid or 0, signal.SIGKILL)
            await one.until(lambda: one.gone)
        async with engine(model, directory, "decode") as two:
            packed, images = pack_tokens(asked[1][0]), images_of([1])
            expected = Submit("1", 1, "f", packed, len(packed) // 4, GREEDY, time_left_s=60.0, images=images)
            two.process.submit(Prefetch(expected))
            await two.until(lambda: two.load.prefetched_blocks == FULL)
            assert await answer(two, 1) == FULL * BLOCK
            rest = await two.answer("rest", prompt_of([0]), GREEDY, output=alone[0][:1], images=images_of([0]))
            assert (rest, two.parts["rest"][-1].cached_tokens) == (alone[0][1:], FULL * BLOCK)
            await counted(two, 0, 0, 0)
            assert await answer(two, 2) == 0, "another text before the picture"
            await counted(two, 0, 0, 1)
            assert await answer(two, 2, salt="tenant") == 0
            await counted(two, 1, 0, 1)
            assert await answer(two, 3, salt="tenant") == 0
            await counted(two, 1, 1, 1)
            store.service.layouts.validate()
            await opened.aclose()
            assert await answer(two, 4) == 0
            assert await answer(two, 3) == 0
            await counted(two, 2, 2, 1)
