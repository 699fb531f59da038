"""services/worker/vllm/connector/weights.py: what makes the digest another one, and what does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.worker.vllm.connector.weights import PIECE_BYTES, named_weights, weights_digest
from shared.errors import ConfigError

CONFIG = {"hidden_size": 8, "rope_theta": 1e4}
SAID = {"dtype": "float32"}


def model(directory: Path, content: bytes = bytes(10 * PIECE_BYTES)) -> Path:
    directory.mkdir(exist_ok=True)
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (directory / name).write_bytes(content)
        os.utime(directory / name, ns=(1, 1))
    (directory / "readme.txt").write_text("anything")
    return directory


def test_equal_files_and_settings_have_equal_digests(tmp_path: Path) -> None:
    one = weights_digest(model(tmp_path / "a"), CONFIG, SAID)
    assert len(one) == 16
    assert weights_digest(model(tmp_path / "b"), CONFIG | {"_name_or_path": "elsewhere"}, SAID) == one
    (tmp_path / "a" / "readme.txt").write_text("other")
    assert weights_digest(tmp_path / "a", CONFIG, SAID) == one


def test_a_byte_a_name_a_time_a_field_or_a_setting_makes_another(tmp_path: Path) -> None:
    seen = {weights_digest(model(tmp_path / "a"), CONFIG, SAID)}
    seen.add(weights_digest(model(tmp_path / "b", b"1" + bytes(10 * PIECE_BYTES - 1)), CONFIG, SAID))
    (model(tmp_path / "c") / "model-2.safetensors").rename(tmp_path / "c" / "model-3.safetensors")
    seen.add(weights_digest(tmp_path / "c", CONFIG, SAID))
    os.utime(model(tmp_path / "d") / "model-1.safetensors", ns=(2, 2))
    seen.add(weights_digest(tmp_path / "d", CONFIG, SAID))
    seen.add(weights_digest(tmp_path / "a", CONFIG | {"rope_theta": 1e6}, SAID))
    seen.add(weights_digest(tmp_path / "a", CONFIG, {"dtype": "bfloat16"}))
    seen.add(weights_digest(tmp_path / "a" / "model-1.safetensors", CONFIG, SAID))
    seen.add(named_weights("v1", CONFIG, SAID))
    seen.add(named_weights("v2", CONFIG, SAID))
    assert len(seen) == 9


def test_a_model_without_files_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no files of weights"):
        weights_digest(tmp_path, CONFIG, SAID)
    with pytest.raises(ConfigError, match="No such file"):
        weights_digest(tmp_path / "none", CONFIG, SAID)
