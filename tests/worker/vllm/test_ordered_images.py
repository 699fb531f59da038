"""services/worker/vllm/ordered_images.py: a real vLLM without a language model encodes a tiny LLaVA's images for
another one, which answers as vLLM does alone, also where that one is lost."""

from __future__ import annotations

import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.kvbm.config import PoolConfig
from services.worker.scheduler.encode_orders import LATE
from shared.hashing import salted_image_key
from tests.kvbm.store_rig import serving, settings, until
from tests.worker.vllm.encoder_cache.test_connector import counted, engine, stored
from tests.worker.vllm.environment import needs_vllm
from tests.worker.vllm.tiny_llava import GREEDY, HAS_TORCHVISION, answers_alone, images_of, prompt_of, write_model

pytestmark = [
    needs_vllm,
    pytest.mark.asyncio,
    pytest.mark.skipif(not HAS_TORCHVISION, reason="vLLM has no torchvision"),
]


async def test_a_vllm_that_only_encodes_leaves_images_for_another_one_until_it_is_lost(tmp_path: Path) -> None:
    model, pool = write_model(tmp_path), settings(tmp_path, size_bytes=64 << 20).pool
    asked = [(prompt_of([number]), [number]) for number in (0, 1, 2)]
    alone = answers_alone(model, asked)
    directory = Path(pool.directory)
    images = [images_of([number])[0] for number in (0, 1, 2)]
    kept = PoolConfig(directory=pool.directory, size_bytes=pool.size_bytes, arenas=2)
    async with AsyncExitStack() as opened:
        store = await opened.enter_async_context(serving(tmp_path, pool=kept))
        apart = await opened.enter_async_context(engine(model, directory, "encode"))
        facts = apart.facts
        assert (facts.capacity_blocks, facts.operations, facts.most_images > 0) == (0, (), True)
        await apart.until(lambda: bool(apart.link.kvbm))
        assert await apart.encode(images[0].key, images[0].pixels) == ""
        await until(lambda: stored(store.service) == [1])
        tenants = salted_image_key(images[1].key, "tenant")
        assert await apart.encode(tenants, images[1].pixels) == ""
        await until(lambda: stored(store.service) == [2])
        await counted(apart, 0, 2, 0)
        assert apart.load.image_s > 0
        assert await apart.encode(images[0].key, images[0].pixels) == "", "it is there already"
        await counted(apart, 0, 2, 1)
        assert await apart.encode(images[2].key, images[2].pixels, limit_s=1e-6) == LATE

        async with engine(model, directory) as one:
            assert one.facts.embeddings_layout == facts.embeddings_layout != ""
            assert await one.answer("0", asked[0][0], GREEDY, images=images_of([0])) == alone[0]
            await counted(one, 0, 0, 1)
            assert await one.answer("1", asked[1][0], GREEDY, images=images_of([1]), salt="tenant") == alone[1]
            await counted(one, 0, 0, 2)
            os.kill(apart.process.pid or 0, signal.SIGKILL)
            await apart.until(lambda: apart.gone)
            assert await one.answer("2", asked[2][0], GREEDY, images=images_of([2])) == alone[2]
            await counted(one, 0, 1, 2)
            assert one.load.image_s > 0
        store.service.layouts.validate()
