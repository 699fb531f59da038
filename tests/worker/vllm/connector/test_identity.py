"""services/worker/vllm/connector/identity.py: what names a LoRA's blocks, and when blocks are one piece."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import Struct

from services.worker.model.lora_files import FILES, digest_lora
from services.worker.vllm.connector import identity
from services.worker.vllm.connector.identity import (
    PIECE_BYTES,
    idle_steps,
    keeps_blocks_whole,
    lora_name,
    named_weights,
    placed_images,
    weights_digest,
)
from services.worker.vllm.connector.settings import ConnectorSettings
from shared.errors import ConfigError
from tests.kvbm.store_rig import LIMIT_S

SETTINGS = ConnectorSettings(pool="/none")
CONFIG = {"hidden_size": 8, "rope_theta": 1e4}
SAID = {"dtype": "float32"}


class LoraRequest(Struct):
    """vLLM's LoRARequest, as far as the connector reads it."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with no digest, as a process does."""
    monkeypatch.setattr(identity, "_loras", identity._LoraDigests())


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    directory = tmp_path / "lora"
    directory.mkdir()
    for name in FILES:
        (directory / name).write_bytes(name.encode() * 10)
    return directory


def named(request: LoraRequest) -> str | None:
    """Ask, wait until what is being read was read, and ask again."""
    first = lora_name(request, SETTINGS)
    for thread in threading.enumerate():
        if thread.name == "LoRA digest":
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    return lora_name(request, SETTINGS) if first is None else first


def change(file: Path, content: bytes) -> None:
    """Change a file, so that its time of change differs, too."""
    former = file.stat().st_mtime_ns
    file.write_bytes(content)
    os.utime(file, ns=(former + 10**9, former + 10**9))


def test_a_request_without_a_lora_has_an_empty_name() -> None:
    assert lora_name(None, SETTINGS) == ""


def test_a_lora_is_named_by_its_files_after_they_were_read(lora: Path) -> None:
    request = LoraRequest("l", 1, str(lora))
    assert lora_name(request, SETTINGS) is None, "nothing waits for the files"
    assert named(request) == digest_lora(lora)
    assert lora_name(LoraRequest("other name", 2, str(lora)), SETTINGS) == digest_lora(lora)


@pytest.mark.parametrize("file", FILES)
def test_changed_files_have_another_digest_and_only_under_a_number_that_did_not_have_the_old_ones(
    lora: Path, file: str
) -> None:
    old = named(LoraRequest("l", 1, str(lora)))
    change(lora / file, b"changed")
    assert named(LoraRequest("l", 1, str(lora))) is None, "vLLM may still have the old ones under this number"
    new = named(LoraRequest("l", 2, str(lora)))
    assert new == digest_lora(lora)
    assert new != old


def test_files_that_change_while_they_are_read_have_no_name(
    lora: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def change_after(directory: Path) -> str:
        digest = digest_lora(directory)
        change(lora / FILES[0], b"changed")
        return digest

    monkeypatch.setattr(identity, "digest_lora", change_after)
    with caplog.at_level(logging.WARNING):
        assert named(LoraRequest("l", 1, str(lora))) is None
    assert "changed while it was read" in caplog.text


@pytest.mark.parametrize("file", FILES)
def test_an_adapter_without_a_file_has_no_name_until_the_file_is_there(lora: Path, file: str) -> None:
    content = (lora / file).read_bytes()
    (lora / file).unlink()
    request = LoraRequest("l", 1, str(lora))
    assert named(request) is None
    assert named(LoraRequest("hub", 2, "org/adapter-on-a-hub")) is None
    (lora / file).write_bytes(content)
    assert named(request) == digest_lora(lora)


def test_a_file_that_cannot_be_read_is_reported_once_and_has_no_name(
    lora: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (lora / FILES[1]).unlink()
    (lora / FILES[1]).mkdir()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert named(LoraRequest("l", 1, str(lora))) is None
    assert caplog.text.count("are not exchanged") == 1


def test_a_lora_that_is_loaded_in_place_has_no_name_and_a_name_that_is_an_id_is_taken(lora: Path) -> None:
    request = LoraRequest("l", 1, str(lora), load_inplace=True)
    assert lora_name(request, SETTINGS) is None
    assert "LoRA digest" not in {thread.name for thread in threading.enumerate()}, "its files are not read"
    ids = ConnectorSettings(pool="/none", lora_names_are_ids=True)
    assert lora_name(request, ids) == "l"


def test_over_the_bound_further_loras_have_no_name_and_known_ones_keep_theirs(
    lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "MOST_LORAS", 2)
    names = [named(LoraRequest("l", number, str(lora))) for number in (1, 2, 3)]
    assert names == [digest_lora(lora), digest_lora(lora), None]
    assert named(LoraRequest("l", 1, str(lora))) == digest_lora(lora)


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


@pytest.mark.parametrize(
    ("block_size", "use_mla", "on_cpu", "whole_blocks", "kept"),
    [
        (16, False, False, True, True),
        (64, False, False, True, True),
        (48, False, False, True, False),
        (128, False, False, True, False),  # a backend with smaller blocks would split it, and vLLM not start
        (16, True, False, True, False),
        (16, False, True, True, False),
        (16, False, False, False, False),
    ],
)
def test_blocks_are_one_piece_on_a_gpu_unless_its_backend_may_split_them_or_a_setting_says_no(
    block_size: int, use_mla: bool, on_cpu: bool, whole_blocks: bool, kept: bool
) -> None:
    cache, model = SimpleNamespace(block_size=block_size), SimpleNamespace(use_mla=use_mla)
    config = SimpleNamespace(cache_config=cache, model_config=model)
    settings = ConnectorSettings(pool="/none", whole_blocks=whole_blocks)
    assert keeps_blocks_whole(config, settings, on_cpu=on_cpu) is kept


@pytest.mark.parametrize(("pipeline", "data", "steps"), [(1, 1, 2), (3, 1, 4), (1, 2, 0), (2, 2, 0)])
def test_idle_steps_go_by_the_stages_of_a_pipeline_and_show_nothing_with_data_parallelism(
    pipeline: int, data: int, steps: int
) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=pipeline, data_parallel_size=data)
    assert idle_steps(SimpleNamespace(parallel_config=parallel)) == steps


def feature(name: str, offset: int) -> SimpleNamespace:
    """Return vLLM's feature of an image with four tokens."""
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=4))


def test_images_are_exchanged_if_their_names_are_keys() -> None:
    trusting = ConnectorSettings(pool="/none", image_names_are_keys=True)
    key = bytes(range(32))
    named_by_key = [feature(key.hex(), 3), feature(key.hex(), 9)]
    assert placed_images(named_by_key, trusting) == [(key, 3, 4), (key, 9, 4)]
    assert placed_images(named_by_key, SETTINGS) is None, "a client may have given the name"
    assert placed_images([], SETTINGS) == placed_images([], trusting) == []
    for name in ("uuid", key.hex().upper(), key.hex()[:-2], f"lora:{key.hex()}", f" {key.hex()}", ""):
        assert placed_images([*named_by_key, feature(name, 20)], trusting) is None
