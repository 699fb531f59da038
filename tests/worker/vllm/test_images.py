"""services/worker/vllm/images.py: a tiny LLaVA on a real vLLM answers as vLLM does alone, and no image stands for
another."""

from __future__ import annotations

import hashlib
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
from shared.messages.generate import Image, Sampling
from tests.tiny_model import IMAGE_TOKEN, write_tiny_model
from tests.worker.engine.driven_engine import DrivenEngine
from tests.worker.native.golden.cases import CASES, IMAGE_STARTS, LLAVAS, image_pixels, image_prompt
from tests.worker.vllm.environment import ON_DEVICE, PYTHON, needs_vllm, run_there

pytestmark = [
    needs_vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not list(PYTHON.parents[1].glob("lib/python*/site-packages/torchvision*")), reason="vLLM has no torchvision"
    ),
]

BLOCK = 32
PROMPT = [*image_prompt(16), *image_prompt(16, ())]
GREEDY = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
PICTURES = ([0], [0, 1], [0, 2], [2, 1])
"""The numbers of the pictures of each prompt."""

ALONE = """
import json
from PIL import Image
from transformers import AutoImageProcessor, CLIPImageProcessorPil
from vllm import LLM, SamplingParams
import numpy as np, torch
from services.worker.vllm.images import ImagePrompts

def main(model, prompts, settings):
    llm = LLM(model, dtype="float32", enforce_eager=True, block_size=32, max_num_seqs=4, num_gpu_blocks_override=64,
              **settings)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers = []
    for tokens, pictures in prompts:
        images = [Image.fromarray(np.asarray(picture, np.uint8)) for picture in pictures]
        prompt = {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}
        answers.append(list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids))
    made = ImagePrompts.read(llm.llm_engine.vllm_config.model_config, 4)
    values = made._values(images[-1].tobytes())
    pillow = CLIPImageProcessorPil.from_pretrained(model)(images[-1], return_tensors="pt")["pixel_values"][0]
    default = AutoImageProcessor.from_pretrained(model)(images[-1], return_tensors="pt")["pixel_values"][0]
    print(json.dumps([answers, torch.equal(values, pillow), float((values - default).abs().max())]))
"""


def image(number: int, start: int) -> Image:
    pixels = image_pixels(28, number).tobytes()
    return Image(hashlib.sha256(pixels).digest(), start, 16, pixels)


def images_of(pictures: list[int]) -> tuple[Image, ...]:
    return tuple(image(number, start) for number, start in zip(pictures, IMAGE_STARTS, strict=False))


def prompt_of(pictures: list[int]) -> list[int]:
    return [*image_prompt(16, IMAGE_STARTS[: len(pictures)]), *PROMPT[60:]]


def one_token_each(pictures: list[int]) -> list[int]:
    """Return the prompt as a user of vLLM has it, who leaves it to vLLM to give an image its tokens."""
    prompt = prompt_of(pictures)
    for start in reversed(IMAGE_STARTS[: len(pictures)]):
        prompt[start : start + 16] = [IMAGE_TOKEN]
    return prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("model") / "tiny", **{**CASES[LLAVAS[0]], "hidden": 128, "context_length": 1024}
    )


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
    """Return the answers of vLLM alone, after comparing our pixels with those of transformers."""
    prompts = [(one_token_each(each), [image_pixels(28, number).tolist() for number in each]) for each in PICTURES]
    call = f"\nif __name__ == '__main__':\n    main({str(model)!r}, {prompts!r}, {ON_DEVICE!r})"
    answers, equal, apart = run_there(ALONE + call)
    assert equal
    assert apart < 1e-6, "with torchvision, transformers computes in another order"
    return [list(answer) for answer in answers]


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
    assert await engine.answer("p", prompt_of([0]), GREEDY, images=images_of([0]), prefill_only=True) == alone[0]

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
