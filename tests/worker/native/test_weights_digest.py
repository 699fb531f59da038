"""Tests of which changes of a model change its digest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from services.worker.native.config import read_config
from services.worker.native.tensor_file import TensorFile
from services.worker.native.weights import Checkpoint
from services.worker.native.weights_digest import PIECE_BYTES, PIECES, weights_digest
from tests.tiny_model import write_tiny_model


def digest(directory: Path) -> str:
    return weights_digest(directory, read_config(directory))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a model whose embedding is longer than all pieces of a tensor together."""
    return write_tiny_model(tmp_path / "model", vocab=1024)


def change(directory: Path, tensor: str, element: int) -> None:
    """Change one of the tensor's stored numbers."""
    file = directory / "model.safetensors"
    entry = TensorFile(file).entries[tensor]
    data = bytearray(file.read_bytes())
    at = len(data) - max(entry.data_offsets[1] for entry in TensorFile(file).entries.values())
    at += entry.data_offsets[0] if element >= 0 else entry.data_offsets[1]
    data[at + 4 * element : at + 4 * element + 4] = np.float32(3.25).tobytes()
    file.write_bytes(data)


def test_the_same_model_has_the_same_digest_however_its_files_are_cut(model: Path, tmp_path: Path) -> None:
    assert len(digest(model)) == 16
    assert digest(model) == digest(write_tiny_model(tmp_path / "same", vocab=1024))
    assert digest(model) == digest(write_tiny_model(tmp_path / "cut", vocab=1024, shards=3))


def test_other_weights_or_another_type_have_another_digest(model: Path, tmp_path: Path) -> None:
    assert digest(model) != digest(write_tiny_model(tmp_path / "other", vocab=1024, seed=1))
    assert digest(model) != digest(write_tiny_model(tmp_path / "half", vocab=1024, dtype="float16"))


def test_a_config_with_other_arithmetic_has_another_digest(model: Path) -> None:
    before = digest(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"author": "somebody"}))
    assert digest(model) == before
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert digest(model) != before


@pytest.mark.parametrize("element", [0, -1, 31])
def test_one_changed_number_of_a_norm_changes_the_digest(model: Path, element: int) -> None:
    before = digest(model)
    change(model, "model.layers.1.input_layernorm.weight", element)
    assert digest(model) != before


@pytest.mark.parametrize("element", [0, -1])
def test_a_change_at_either_end_of_a_large_tensor_changes_the_digest(model: Path, element: int) -> None:
    before = digest(model)
    change(model, "model.embed_tokens.weight", element)
    assert digest(model) != before


def test_pieces_of_a_large_tensor_begin_and_end_with_it(model: Path) -> None:
    checkpoint = Checkpoint(model, read_config(model))
    pieces = [bytes(piece) for piece in checkpoint.pieces("model.embed_tokens.weight", PIECES, PIECE_BYTES)]
    stored = checkpoint.floats("model.embed_tokens.weight").tobytes()
    assert [len(piece) for piece in pieces] == [PIECE_BYTES] * PIECES
    assert stored.startswith(pieces[0])
    assert stored.endswith(pieces[-1])
    places = [stored.index(piece) for piece in pieces]
    assert places == sorted(set(places))


def test_a_small_tensor_is_one_piece(model: Path) -> None:
    checkpoint = Checkpoint(model, read_config(model))
    [piece] = checkpoint.pieces("model.norm.weight", PIECES, PIECE_BYTES)
    assert bytes(piece) == checkpoint.floats("model.norm.weight").tobytes()


def test_a_new_field_of_the_config_changes_no_digest_of_models_without_it(tmp_path: Path) -> None:
    """Blocks on disk from before stay usable."""
    assert digest(write_tiny_model(tmp_path / "llama")) == "515e85870d194381"
    assert digest(write_tiny_model(tmp_path / "qwen2", architecture="Qwen2ForCausalLM")) == "bfe19d20f4ba9d4a"
