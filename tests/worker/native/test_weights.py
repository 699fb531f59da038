"""A directory's tensors: found, checked, named when wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from services.worker.native.config import read_config
from services.worker.native.prepare import prepare
from services.worker.native.tensor_file import TensorFile, write_tensors
from services.worker.native.weights import (
    EMBEDDING,
    HEAD,
    PIECE_BYTES,
    PIECES,
    Checkpoint,
    load_weights,
    weights_digest,
)
from shared.errors import ModelError
from tests.tiny_model import DType, write_tiny_model


def rewrite_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_give_the_weights_of_the_single_file(tmp_path: Path) -> None:
    single, sharded = write_tiny_model(tmp_path / "single"), write_tiny_model(tmp_path / "sharded", shards=3)
    one = load_weights(single, read_config(single))
    three = load_weights(sharded, read_config(sharded))
    np.testing.assert_array_equal(one.embedding, three.embedding)
    np.testing.assert_array_equal(one.layers[1].down, three.layers[1].down)
    assert one.head is one.embedding
    assert one.layers[0].q_bias is None


def test_float32_is_used_in_place_and_sixteen_bits_are_not(tmp_path: Path) -> None:
    for dtype, mapped in (("float32", True), ("float16", False), ("bfloat16", False)):
        directory = write_tiny_model(tmp_path / dtype, dtype=dtype)  # type: ignore[arg-type]
        assert Checkpoint(directory, read_config(directory)).mapped is mapped


def set_tied(directory: Path) -> Path:
    """Let the config.json say that the output projection is the embedding."""
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def store(directory: Path, source: Path, names: dict[str, str]) -> None:
    """Write the tensors of `source`, some of them under other names: name → its tensor's name there."""
    checkpoint = Checkpoint(source, read_config(source))
    shapes = {name: checkpoint.shapes[there] for name, there in names.items()}
    write_tensors(directory / "model.safetensors", shapes, lambda name: checkpoint.floats(names[name]), lambda _: None)


@pytest.mark.parametrize(("dtype", "shards"), [("float32", 1), ("bfloat16", 3)])
def test_a_head_of_its_own_is_used_though_the_config_ties_it_as_in_transformers(
    tmp_path: Path, dtype: DType, shards: int
) -> None:
    untied = write_tiny_model(tmp_path / "untied", tied=False, dtype=dtype, shards=shards)
    tied = set_tied(write_tiny_model(tmp_path / "tied", tied=False, dtype=dtype, shards=shards))
    expected, found = load_weights(untied, read_config(untied)), load_weights(tied, read_config(tied))
    np.testing.assert_array_equal(found.head, expected.head)
    np.testing.assert_array_equal(found.embedding, expected.embedding)
    converted = prepare(tied, tmp_path / "cache", lambda _: None)
    np.testing.assert_array_equal(load_weights(converted, read_config(converted)).head, expected.head)


def test_a_tied_model_that_stores_the_same_matrix_twice_or_its_head_alone_has_one(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", tied=False)
    names = {name: name for name in Checkpoint(source, read_config(source)).shapes}
    directory = set_tied(write_tiny_model(tmp_path / "tied"))
    store(directory, source, {**names, HEAD: EMBEDDING})
    twice = load_weights(directory, read_config(directory))
    assert twice.head is twice.embedding
    del names[EMBEDDING]
    store(directory, source, names)
    alone = load_weights(directory, read_config(directory))
    assert alone.head is alone.embedding
    np.testing.assert_array_equal(alone.embedding, Checkpoint(source, read_config(source)).floats(HEAD))


def test_a_head_that_no_engine_could_use_is_passed_over_in_a_tied_model(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", tied=False)
    names = {name: name for name in Checkpoint(source, read_config(source)).shapes}
    directory = set_tied(write_tiny_model(tmp_path / "tied"))
    store(directory, source, {**names, HEAD: "model.norm.weight"})
    weights = load_weights(directory, read_config(directory))
    assert weights.head is weights.embedding


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, tied=True)
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(
        config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    with pytest.raises(
        ModelError, match=r"lm_head\.weight is in no safetensors file; expected one with shape \(320, 64\)"
    ):
        load_weights(directory, read_config(directory))


def test_a_tensor_of_the_wrong_shape_is_named_with_its_file(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path)
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"intermediate_size": 128', '"intermediate_size": 129'))
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor .*mlp.* has shape .*; expected .*129"):
        load_weights(directory, read_config(directory))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: No such file"):
        load_weights(directory, read_config(directory))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: No such file"):
        load_weights(directory, read_config(directory))


def test_an_index_with_other_paths_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, shards=2)
    config = read_config(directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    rewrite_index(directory, dict.fromkeys(index, "model-00001-of-00002.safetensors"))
    with pytest.raises(
        ModelError, match=r"00001-of-00002\.safetensors: tensor .* is missing; the index says it is here"
    ):
        load_weights(directory, config)
    rewrite_index(directory, dict.fromkeys(index, "../model.safetensors"))
    with pytest.raises(ModelError, match=r"'\.\./model\.safetensors' is not the name of a file in this directory"):
        load_weights(directory, config)
    rewrite_index(directory, 3)
    with pytest.raises(ModelError, match=r"index\.json: Expected `object`, got `int`"):
        load_weights(directory, config)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_tensors_of_a_text_part_are_found_below_the_names_of_transformers_4_and_5(tmp_path: Path, prefix: str) -> None:
    flat = write_tiny_model(tmp_path / "flat", architecture="Gemma3ForCausalLM", shards=2)
    expected = load_weights(flat, read_config(flat))
    nested = write_tiny_model(tmp_path / "nested", architecture="Gemma3ForConditionalGeneration", shards=2)
    for file in nested.glob("model*"):
        content, same_length = file.read_bytes(), prefix.encode().ljust(len("language_model.model."))
        assert b"language_model.model." in content
        file.write_bytes(content.replace(b"language_model.model.", same_length))
    weights = load_weights(nested, read_config(nested))
    np.testing.assert_array_equal(weights.layers[1].down, expected.layers[1].down)
    np.testing.assert_array_equal(weights.norm, expected.norm)


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
