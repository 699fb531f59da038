"""The vision tower on the device against the NumPy tower, on small random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.worker.config import CudaConfig, Dtype
from services.worker.contracts.runner import Work
from services.worker.native.config import read_config
from services.worker.native.prepare import prepare
from services.worker.native.vision_tower import VisionTower
from shared.messages.generate import Image
from tests.gpu.device import cupy_on_a_device
from tests.tiny_model import CLIP, SIGLIP, write_tiny_model
from tests.worker.native.golden.cases import CASES, GOLDEN, IMAGE_STARTS, LLAVAS, image_pixels, image_prompt
from tests.worker.native.works import work

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

from services.worker.native.cuda.vision_tower import CudaVisionTower  # noqa: E402
from tests.gpu.models import cuda_runner  # noqa: E402

Floats = NDArray[np.float32]
WIDE: dict[str, dict[str, Any]] = {
    "CLIP, heads of 64, two tiles and a rest": {**CLIP, "hidden_size": 128, "num_attention_heads": 2, "image_size": 98},
    "SigLIP, heads of 64": {**SIGLIP, "hidden_size": 128, "num_attention_heads": 2, "image_size": 84},
    "CLIP, heads of 128": {**CLIP, "hidden_size": 256, "num_attention_heads": 2, "intermediate_size": 512},
    "SigLIP, heads of 72": {**SIGLIP, "hidden_size": 144, "num_attention_heads": 2},
}
WIDE_APART: dict[Dtype, float] = {"float32": 5e-5, "float16": 1e-2, "bfloat16": 6e-2}
"""The largest difference, of the largest embedding."""


def towers(tmp_path: Path, computed_in: Dtype, **model: Any) -> tuple[VisionTower, CudaVisionTower, list[bytes]]:
    """Return both towers of a model, and seven images, more than are computed at once."""
    directory = prepare(write_tiny_model(tmp_path / "model", **model), tmp_path / "cache", lambda _: None)
    config = read_config(directory)
    host = VisionTower.load(directory, config, None)
    device = CudaVisionTower.load(directory, config, computed_in, cp.cuda.Stream(non_blocking=True), most_images=3)
    assert host is not None
    assert device is not None
    assert config.vision is not None
    return host, device, [image_pixels(config.vision.image_size, number).tobytes() for number in range(7)]


def encoded(tower: CudaVisionTower, images: list[bytes]) -> Floats:
    found = tower.encode(images)
    cp.cuda.Device().synchronize()
    embeddings: Floats = cp.asnumpy(found)
    return embeddings


@pytest.mark.parametrize("name", LLAVAS)
def test_in_float32_images_get_the_embeddings_of_the_numpy_tower(tmp_path: Path, name: str) -> None:
    host, device, images = towers(tmp_path, "float32", **CASES[name])
    expected = np.stack([host.encode(image) for image in images])
    np.testing.assert_allclose(encoded(device, images), expected, rtol=0, atol=5e-4)
    np.testing.assert_allclose(encoded(device, images[4:5]), expected[4:5], rtol=0, atol=5e-4)
    device.close()


@pytest.mark.parametrize("dtype", list(WIDE_APART))
@pytest.mark.parametrize("name", WIDE)
def test_towers_of_other_shapes_are_as_right_as_the_type_allows(tmp_path: Path, name: str, dtype: Dtype) -> None:
    model = {"architecture": "LlavaForConditionalGeneration", "tied": False, "seed": 31}
    host, device, images = towers(tmp_path, dtype, **model, llava={"vision_config": WIDE[name]})
    expected = np.stack([host.encode(image) for image in images])
    apart = np.abs(encoded(device, images) - expected).max() / np.abs(expected).max()
    print(f"{name}, {dtype}: {apart:.2e}")
    assert apart < WIDE_APART[dtype]
    device.close()


def test_images_are_computed_as_if_each_were_alone(tmp_path: Path) -> None:
    model = {"architecture": "LlavaForConditionalGeneration", "tied": False, "seed": 32}
    _, device, images = towers(tmp_path, "bfloat16", **model, llava={"vision_config": WIDE["SigLIP, heads of 64"]})
    together = encoded(device, images[:3])
    swapped = encoded(device, [images[2], images[1], images[0]])
    np.testing.assert_allclose(together[[2, 1, 0]], swapped, rtol=0, atol=1e-2 * np.abs(together).max())
    device.close()


@pytest.mark.parametrize("name", LLAVAS)
def test_a_runner_answers_prompts_with_images_as_transformers_does(tmp_path: Path, name: str) -> None:
    directory = prepare(write_tiny_model(tmp_path / "model", **CASES[name]), tmp_path / "cache", lambda _: None)
    more: dict[str, Any] = {"capacity_blocks": 32, "path": str(directory), "most_images": 2}
    runner = cuda_runner(directory, CudaConfig(dtype="float32", graph_upper_bound=4), **more)
    takes = runner.facts.images
    assert takes is not None
    images = tuple(
        Image(bytes([number]) * 32, start, takes.tokens, image_pixels(takes.width, number).tobytes())
        for number, start in enumerate(IMAGE_STARTS)
    )
    with np.load(GOLDEN / "llava.npz") as golden:
        expected = [int(token) for token in golden[f"{name}: output"]]
    for cut in (60, 12):  # the second time the first image is in two steps, and the other is in the cache
        assert answered(runner, image_prompt(takes.tokens), images, cut, len(expected)) == expected
    cache = runner.encoder_cache
    assert cache is not None
    assert cache.encoded == len(images)
    assert runner.operate("sleep", "", "", 1) == ""
    assert runner.operate("wake", "", "", 1) == ""
    assert answered(runner, image_prompt(takes.tokens), images, 60, len(expected)) == expected
    assert cache.encoded == 2 * len(images)
    runner.close()


def answered(runner: Any, prompt: list[int], images: tuple[Image, ...], cut: int, tokens: int) -> list[int]:
    """Return the tokens of an answer, whose prompt is computed up to `cut` first."""
    found: list[int] = []
    seen = [work(prompt, [2, 1, 3, 0, 5, 4, 7, 6])]
    one: Work = seen[0]
    one.images = images
    if cut < len(prompt):
        one.end = cut
        assert runner.step(seen) == [None]
        one.start, one.end = cut, len(prompt)
    while len(found) < tokens:
        [drawn] = runner.step(seen)
        found.append(drawn.token)
        one.history = [*one.history, drawn.token]
        one.start, one.end = one.end, one.end + 1
    return found
