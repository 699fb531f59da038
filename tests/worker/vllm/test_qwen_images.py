"""services/worker/vllm/qwen_images.py: what a model's files say of images is read or refused by name, and tiny models
of Qwen2-VL's family on a real vLLM answer as vLLM does alone, whatever the pictures' sizes; blocks and embeddings of
pictures outlive the engine in a kvbm."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from services.frontend.images.decoder_program import prepare
from services.frontend.images.decoding import Prepare, key_of
from services.kvbm.config import PoolConfig
from services.worker.config import WorkerConfig
from services.worker.vllm.qwen_images import PatchShape, grid_of, patches_of, read_input
from shared.errors import ModelError
from shared.hashing import image_extras, pack_tokens
from shared.messages.cards import ImageInput
from shared.messages.generate import Image
from tests.frontend.images.golden import FOLDER
from tests.kvbm.store_rig import serving, settings, until
from tests.worker.engine.driven_engine import DrivenEngine
from tests.worker.vllm.encoder_cache.test_connector import counted, stored
from tests.worker.vllm.environment import ON_DEVICE, PYTHON, needs_vllm, run_there
from tests.worker.vllm.tiny_llava import BLOCK, GREEDY, HAS_TORCHVISION
from tests.worker.vllm.tiny_qwen import (
    FAMILIES,
    IMAGE_TOKEN,
    LEAST,
    MOST,
    answers_alone,
    image,
    picture,
    unit_of,
    write_model,
)

needs_torchvision = pytest.mark.skipif(not HAS_TORCHVISION, reason="vLLM has no torchvision")
SIZES = ((3, 2), (2, 5), (3, 2))
"""The tokens in a row and in a column of each picture."""
SHOWN = ([0], [0, 1], [2, 1], [1, 0])
"""The numbers of the pictures of each prompt."""


def prompt_of(shown: list[int], *, expanded: bool, first: int = 40) -> list[int]:
    """Return a prompt with pictures, each of one token or of all of its own."""
    tokens = [*range(first, first + 20)]
    for number in shown:
        count = SIZES[number][0] * SIZES[number][1] if expanded else 1
        tokens += [316, *[IMAGE_TOKEN] * count, 317, 50 + number]
    return [*tokens, *range(100, 170)]


def images_of(shown: list[int], pictures: list[NDArray[np.uint8]]) -> tuple[Image, ...]:
    start, found = 21, list[Image]()
    for number in shown:
        count = SIZES[number][0] * SIZES[number][1]
        found.append(image(pictures[number], start, count))
        start += count + 3
    return tuple(found)


@asynccontextmanager
async def engine(model: Path, pool: str) -> AsyncIterator[DrivenEngine]:
    arguments = {"num_gpu_blocks_override": 64, "enforce_eager": True, "dtype": "float32", **ON_DEVICE}
    arguments["limit_mm_per_prompt"] = {"image": 4, "video": 0}
    given = {
        **{"model": str(model), "model_name": "eyes", "engine": "vllm", "block_size": BLOCK, "capacity_blocks": 0},
        **{"vllm": arguments, "vllm_python": str(PYTHON), "threads": 1},
        "kvbm": {"pool": pool, "embeddings": True, "wait_s": 60.0, "timeout_s": 4.0},
    }
    driven = await DrivenEngine.start(msgspec.convert(given, WorkerConfig))
    try:
        yield driven
    finally:
        await driven.close()


QWEN2_7B: dict[str, Any] = {
    **{"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    **{"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
    **{"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"},
}
QWEN3_8B = {
    **QWEN2_7B,
    **{"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "min_pixels": None},
    **{"max_pixels": None, "image_processor_type": "Qwen2VLImageProcessorFast"},
}


def read(directory: Path, processor: dict[str, Any], side: int = 14, token: int = 5, **arguments: Any) -> ImageInput:
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return read_input(directory, token, 320, PatchShape(side, 2, 2), arguments)


def test_the_bounds_of_an_image_are_those_of_the_model_and_of_vllms_arguments(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN2_7B) == ImageInput(5, 0, 0, 0, 0, "BICUBIC", 28, 3136, 1280 * 28**2)
    assert read(tmp_path, QWEN3_8B, 16) == ImageInput(5, 0, 0, 0, 0, "BICUBIC", 32, 65536, 1280 * 32**2)
    large = read(tmp_path, QWEN2_7B, max_pixels=12845056)
    assert large == ImageInput(5, 0, 0, 0, 0, "BICUBIC", 28, 3136, 12845056)
    wide = read(tmp_path, QWEN2_7B | {"min_pixels": 2_000_000})
    assert (wide.least_pixels, wide.most_pixels) == (2_000_000, 2_000_000)
    plain = {"image_processor_type": "Qwen2VLImageProcessor"}
    assert read(tmp_path, plain) == ImageInput(5, 0, 0, 0, 0, "BICUBIC", 28, 3136, 1003520)
    both = {**QWEN2_7B, "size": {"shortest_edge": 9, "longest_edge": 99_999}, "resample": 2}
    assert read(tmp_path, both) == ImageInput(5, 0, 0, 0, 0, "BILINEAR", 28, 3136, 1280 * 28**2)
    assert read(tmp_path, QWEN2_7B, max_pixels=4000) == ImageInput(5, 0, 0, 0, 0, "BICUBIC", 28, 3136, 4000)
    sized = read(tmp_path, QWEN2_7B, size={"shortest_edge": 800, "longest_edge": 1600}, min_pixels=900)
    assert sized == ImageInput(5, 0, 0, 0, 0, "BICUBIC", 28, 900, 1600)


@pytest.mark.parametrize(
    ("processor", "arguments", "why"),
    [
        ({"patch_size": 16}, {}, "preprocessor_config.json: patch_size is 16; the vision tower's is 14"),
        ({"merge_size": 1}, {}, "preprocessor_config.json: merge_size is 1; the vision tower's is 2"),
        ({"temporal_patch_size": 1}, {}, "temporal_patch_size is 1; the vision tower's is 2"),
        ({"do_resize": False}, {}, "do_resize is False; only true is supported"),
        ({"resample": 9}, {}, "resample is 9; expected one of Pillow's filters, 0 to 5"),
        ({"min_pixels": -1}, {}, "images have -1 to 12845056 pixels"),
        ({"min_pixels": 1 << 24}, {}, "images have 16777216 to 12845056 pixels"),
        ({"max_pixels": 1 << 31}, {}, "images have 3136 to 2147483648 pixels"),
        ({"min_pixels": 1, "max_pixels": 700}, {}, "with a token's 784 below its end"),
        ({"min_pixels": None, "size": {"max_pixels": 9}}, {}, "images have 0 to 12845056 pixels"),
        ({"min_pixels": "many"}, {}, "preprocessor_config.json: Expected `int | null`, got `str`"),
        ({"size": 300}, {}, "preprocessor_config.json: Expected `object`, got `int`"),
        ({}, {"max_pixels": 9.5}, "mm_processor_kwargs: Expected `int | null`, got `float`"),
        ({}, {"do_resize": False}, "mm_processor_kwargs: do_resize is not read; min_pixels, max_pixels, size are"),
        ({}, {"token": 320}, "image_token_id is 320; expected one of the 320 tokens"),
        ({}, {"side": 0}, "vision_config has a patch_size of 0; expected 1 to 1024"),
    ],
)
def test_files_that_make_no_sense_are_refused_by_field(
    tmp_path: Path, processor: dict[str, Any], arguments: dict[str, Any], why: str
) -> None:
    given = {"patch_size": None} if "side" in arguments else {}
    with pytest.raises(ModelError, match=re.escape(why)):
        read(tmp_path, QWEN2_7B | given | processor, **arguments)


def test_without_a_processors_file_there_are_no_images(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"preprocessor_config\.json: missing; it says how images are prepared"):
        read_input(tmp_path, 5, 320, PatchShape(14, 2, 2), {})


def test_the_patches_of_a_token_follow_each_other_by_colour_and_frame() -> None:
    patch = PatchShape(side=3, merge=2, frames=2)
    shown = np.random.default_rng(0).integers(0, 256, (12, 18, 3), np.uint8)
    assert grid_of(18, 12, patch) == (1, 4, 6)
    found = patches_of(shown.tobytes(), 18, 12, patch)
    expected = [
        np.stack([shown[3 * row : 3 * row + 3, 3 * column : 3 * column + 3, colour]] * 2).ravel()
        for top in (0, 2)
        for left in (0, 2, 4)
        for row in (top, top + 1)
        for column in (left, left + 1)
        for colour in range(3)
    ]
    assert np.array_equal(found, np.concatenate(expected).reshape(24, -1))


_PROCESSED = """
import json, sys
import numpy as np
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from services.worker.vllm.qwen_images import PatchShape, grid_of, patches_of

def main(model, file, pixels, width, height, patch):
    made = Qwen2VLImageProcessorPil.from_pretrained(model)(Image.open(file), do_rescale=False, do_normalize=False)
    ours = patches_of(open(pixels, "rb").read(), width, height, PatchShape(*patch))
    same = np.array_equal(np.asarray(made["pixel_values"]), ours)
    print(json.dumps([same, made["image_grid_thw"].tolist() == [list(grid_of(width, height, PatchShape(*patch)))]]))
"""


@needs_vllm
def test_a_file_becomes_the_patches_that_transformers_makes_of_it(tmp_path: Path) -> None:
    takes = read(tmp_path, QWEN2_7B, max_pixels=28 * 28 * 40)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN2_7B | {"max_pixels": takes.most_pixels}))
    file = FOLDER / "tall.jpg"
    source = file.read_bytes()
    made = prepare(Prepare(source, key_of(source, takes), "", takes, 1 << 25, 1 << 25))
    (tmp_path / "pixels").write_bytes(made.pixels)
    given = (str(tmp_path), str(file), str(tmp_path / "pixels"), made.width, made.height, (14, 2, 2))
    assert run_there(f"{_PROCESSED}\nmain(*{given!r})") == [True, True]


@needs_vllm
@needs_torchvision
@pytest.mark.parametrize("family", FAMILIES)
async def test_answers_are_those_of_vllm_alone_and_outlive_the_engine(tmp_path: Path, family: str) -> None:
    model, pool = write_model(tmp_path, family), settings(tmp_path, size_bytes=64 << 20).pool
    pictures = [picture(family, number, *size) for number, size in enumerate(SIZES)]
    asked = [prompt_of(shown, expanded=False) for shown in SHOWN]
    asked.append(prompt_of(SHOWN[1], expanded=False, first=60))
    given = [*SHOWN, SHOWN[1]]
    alone = answers_alone(model, [(asked[at], [pictures[each] for each in shown]) for at, shown in enumerate(given)])
    assert len({tuple(answer) for answer, _ in alone[:3]}) == 3, "the pictures make no difference"

    async def answer(engine: DrivenEngine, at: int, name: str) -> int:
        """Compare an answer with vLLM's alone; return how many tokens of the prompt were not computed."""
        tokens = prompt_of(given[at], expanded=True, first=60 if at == len(SHOWN) else 40)
        assert len(tokens) == alone[at][1]
        found = await engine.answer(name, tokens, GREEDY, images=images_of(given[at], pictures))
        assert found == alone[at][0], name
        return engine.parts[name][-1].cached_tokens

    kept = PoolConfig(directory=pool.directory, size_bytes=pool.size_bytes, arenas=2)
    async with serving(tmp_path, pool=kept) as store:
        async with engine(model, pool.directory) as one:
            area, unit = unit_of(family) ** 2, unit_of(family)
            takes = ImageInput(IMAGE_TOKEN, 0, 0, 0, 0, "BICUBIC", unit, LEAST * area, MOST * area)
            assert (one.facts.images, one.facts.most_images) == (takes, 4)
            cached = [await answer(one, at, f"a{at}") for at in range(len(SHOWN))]
            assert cached == [0, 0, 0, 0], "the first block has tokens of the first picture"
            assert await answer(one, 1, "again") == 3 * BLOCK
            snapshot = await one.snapshot()
            known = {(block.tokens, block.extra) for block in snapshot.blocks}
            for shown in SHOWN:
                tokens = prompt_of(shown, expanded=True)
                found = [(each.key, each.start, each.tokens) for each in images_of(shown, pictures)]
                extras = image_extras(found, BLOCK)
                for block in range(len(tokens) // BLOCK):
                    packed = pack_tokens(tokens[BLOCK * block : BLOCK * (block + 1)])
                    assert (packed, extras.get(block, b"")) in known
            await until(lambda: len(stored(store.service)) == 2 and stored(store.service)[1] == len(SIZES))
            await until(lambda: stored(store.service)[0] >= 4 * 3)
            os.kill(one.process.pid or 0, signal.SIGKILL)
            await one.until(lambda: one.gone)
        async with engine(model, pool.directory) as two:
            assert await answer(two, 1, "b1") == 3 * BLOCK, "its blocks"
            await counted(two, 0, 0, 0)
            assert await answer(two, 4, "b4") == 0, "another text before the pictures"
            await counted(two, 0, 0, 2)
            tokens, placed = prompt_of(SHOWN[3], expanded=True), images_of(SHOWN[3], pictures)
            rest = await two.answer("rest", tokens, GREEDY, output=alone[3][0][:5], images=placed)
            assert rest == alone[3][0][5:], "an answer that is continued"
            store.service.layouts.validate()
