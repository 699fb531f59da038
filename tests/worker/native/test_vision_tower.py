"""The vision tower gives transformers' embeddings (golden files), and its erf is erf."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from services.worker.native.config import read_config
from services.worker.native.prepare import prepare
from services.worker.native.vision_tower import VisionTower, erf
from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import CASES, GOLDEN, LLAVAS, image_pixels


@pytest.mark.parametrize("name", LLAVAS)
def test_images_get_transformers_embeddings(tmp_path: Path, name: str) -> None:
    directory = prepare(write_tiny_model(tmp_path / "model", **CASES[name]), tmp_path / "cache", lambda _: None)
    config = read_config(directory)
    tower = VisionTower.load(directory, config, None)
    assert tower is not None
    assert config.vision is not None
    with np.load(GOLDEN / "llava.npz") as golden:
        expected = golden[f"{name}: embeddings"]
    assert expected.shape[1] == config.vision.input.tokens
    for number, embeddings in enumerate(expected):
        found = tower.encode(image_pixels(config.vision.image_size, number).tobytes())
        np.testing.assert_allclose(found, embeddings, rtol=0, atol=1e-4)


def test_erf_is_that_of_the_standard_library() -> None:
    x = np.linspace(-6, 6, 2001, dtype=np.float32)
    np.testing.assert_allclose(erf(x), [math.erf(each) for each in x], rtol=0, atol=5e-7)
