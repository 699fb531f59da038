"""services/worker/vllm/images.py: a tiny LLaVA on a real vLLM answers as vLLM does alone, and no image stands for
another."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from services.worker.config import WorkerConfig
from shared.hashing import image_extras, pack_tokens
from shared.messages.cards import ImageInput
from tests.tiny_model import IMAGE_TOKEN
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
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not HAS_TORCHVISION, reason="vLLM has no torchvision"),
]

PICTURES = ([0], [0, 1], [0, 2], [2, 1])
"""The numbers of the pictures of each prompt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config(model: Path) -> WorkerConfig:
    arguments = {"num_gpu_blocks_override": 64, "enforce_eager": True, "dtype": "float32", **ON_DEVICE}
    return msgspec.convert(
        {
            "model": str(model),
            "engine": "vllm",
            "block_size": BLOCK,
            "capacity_blocks": 0,
            "vllm": arguments,
            "vllm_python": str(PYTHON),
            "threads": 1,
        },
        WorkerConfig,
    )


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    return answers_alone(model, [(prompt_of(each), each) for each in PICTURES])


@pytest_asyncio.fixture(loop_scope="module")
async def engine(config: WorkerConfig) -> AsyncIterator[DrivenEngine]:
    driven = await DrivenEngine.start(config)
    yield driven
    await driven.close()


async def test_answers_are_those_of_vllm_alone_and_only_the_same_pictures_share_blocks(
    engine: DrivenEngine, alone: list[list[int]], config: WorkerConfig
) -> None:
    assert engine.facts.images == ImageInput(IMAGE_TOKEN, 16, 28, 28, 28, "BICUBIC")
    assert engine.facts.most_images == 16
    for number, pictures in enumerate(PICTURES):
        found = await engine.answer(f"a{number}", prompt_of(pictures), GREEDY, images=images_of(pictures))
        assert found == alone[number]
    assert len({tuple(answer) for answer in alone}) == len(PICTURES), "the pictures make no difference"
    cached = [engine.parts[f"a{number}"][-1].cached_tokens for number in range(len(PICTURES))]
    assert cached == [0, BLOCK, BLOCK, 0], "the first block has the first picture alone"
    again = await engine.answer("again", prompt_of([0, 1]), GREEDY, images=images_of([0, 1]))
    assert again == alone[1]
    assert engine.parts["again"][-1].cached_tokens == 3 * BLOCK

    salted = await engine.answer("salted", prompt_of([0, 1]), GREEDY, images=images_of([0, 1]), salt="a")
    assert (salted, engine.parts["salted"][-1].cached_tokens) == (alone[1], 0)
    handed = await engine.answer("p", prompt_of([0]), GREEDY, images=images_of([0]), prefill_only=True)
    assert handed == alone[0][:1]

    snapshot = await engine.snapshot()
    known = {(block.tokens, block.extra) for block in snapshot.blocks}
    for pictures in PICTURES:
        extras = image_extras([(one.key, one.start, one.tokens) for one in images_of(pictures)], BLOCK)
        for block in range(3):
            tokens = pack_tokens(prompt_of(pictures)[BLOCK * block : BLOCK * (block + 1)])
            assert (tokens, extras.get(block, b"")) in known

    os.kill(engine.process.pid or 0, signal.SIGKILL)
    await engine.until(lambda: engine.gone)
    other = await DrivenEngine.start(config)
    try:
        rest = await other.answer("rest", prompt_of([0, 1]), GREEDY, output=alone[1][:5], images=images_of([0, 1]))
        assert rest == alone[1][5:]
    finally:
        await other.close()
