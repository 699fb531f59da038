from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.worker.native.config import read_config
from services.worker.native.lora_file import LoraLayers, read_lora
from shared.errors import ModelError
from tests.tiny_lora import PREFIX, write_lora
from tests.tiny_model import write_safetensors, write_tiny_model
from tests.worker.native.merged import read_tensors

Tensors = dict[str, NDArray[np.float32]]
Q = f"{PREFIX}0.self_attn.q_proj."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def read(directory: Path, model: Path, *, most_rank: int = 64, most_bytes: int = 1 << 30) -> LoraLayers:
    return read_lora(directory, read_config(model), most_rank=most_rank, most_bytes=most_bytes)


def refusal(directory: Path, model: Path, **limits: int) -> str:
    """Return why a LoRA is refused: one line."""
    with pytest.raises(ModelError) as refused:
        read(directory, model, **limits)
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_a_lora_is_read_in_float32_with_its_scale_and_the_files_may_go(model: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path, model, rank=4, alpha=6)
    stored = read_tensors(lora / "adapter_model.safetensors")
    layers = read(lora, model)
    (lora / "adapter_model.safetensors").write_bytes(b"")
    assert len(layers) == 2
    assert set(layers[0]) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    pair = layers[0]["q_proj"]
    assert np.array_equal(pair.a, stored[Q + "lora_A.weight"])
    np.testing.assert_allclose(pair.b, stored[Q + "lora_B.weight"] * 1.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"use_dora": True}, "use_dora"),
        ({"use_qalora": True}, "use_qalora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"r": "eight"}, "r"),
        ({"r": 0}, "r is 0"),
        ({"r": 65}, "lora_rank, 64"),
        ({"r": 4}, "shape"),
        ({"rank_pattern": {"q_proj": 2000}}, "r is 2000"),
        ({"rank_pattern": {"(a+)+b": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"[": 2}}, "alpha_pattern"),
        ({"alpha_pattern": {"a" * 200: 2}}, "alpha_pattern"),
        ({"alpha_pattern": {f"m{number}": 2 for number in range(5000)}}, "alpha_pattern has 5000 entries"),
        ({"target_modules": ["v_proj"]}, "target_modules does not name model.layers.0.self_attn.q_proj"),
        ({"layers_to_transform": [1]}, "layers_to_transform does not name layer 0"),
        ({"layers_to_transform": 1}, "layers_to_transform does not name layer 0"),
    ],
)
def test_settings_that_are_not_served_are_refused_by_name(
    model: Path, tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    lora = write_lora(tmp_path, model, settings=settings)
    text = refusal(lora, model)
    assert named in text
    assert "adapter_config.json" in text or named == "shape"


@pytest.mark.parametrize("field", ["r", "lora_alpha"])
def test_settings_without_a_scale_are_refused(model: Path, tmp_path: Path, field: str) -> None:
    lora = write_lora(tmp_path, model)
    settings = json.loads((lora / "adapter_config.json").read_text())
    del settings[field]
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    assert field in refusal(lora, model)


def change(tensors: Tensors, kind: str) -> None:
    """Make a LoRA's tensors wrong in one way."""
    a, b = Q + "lora_A.weight", Q + "lora_B.weight"
    match kind:
        case "no partner A":
            del tensors[a]
        case "no partner B":
            del tensors[b]
        case "not a number":
            tensors[a] = tensors[a] * np.float32(np.nan)
        case "infinite":
            tensors[b] = tensors[b] + np.float32(np.inf)
        case "overflows":
            tensors[b] = tensors[b] * 0 + np.float32(3e38)
        case "unknown":
            tensors["base_model.model.model.norm.weight"] = np.ones(64, np.float32)
        case "dora":
            tensors[Q + "lora_magnitude_vector"] = np.ones(64, np.float32)
        case "embedding":
            tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = np.ones((8, 320), np.float32)
        case "lm_head":
            tensors["base_model.model.lm_head.lora_A.weight"] = tensors[a]
            tensors["base_model.model.lm_head.lora_B.weight"] = np.ones((320, 8), np.float32)
        case "another prefix":
            tensors["transformer.h.0.q_proj.lora_A.weight"] = tensors[a]
        case "another layer":
            for half in "AB":
                tensors[f"{PREFIX}2.self_attn.q_proj.lora_{half}.weight"] = tensors[f"{Q}lora_{half}.weight"]
        case "no such projection":
            for half in "AB":
                tensors[f"{PREFIX}0.mlp.q_proj.lora_{half}.weight"] = tensors[f"{Q}lora_{half}.weight"]
        case "fused":
            for half in "AB":
                tensors[f"{PREFIX}0.self_attn.qkv_proj.lora_{half}.weight"] = tensors[f"{Q}lora_{half}.weight"]
        case "another width":
            tensors[a] = tensors[a][:, :32].copy()
        case "another height":
            tensors[b] = tensors[b][:32].copy()
        case "none":
            tensors.clear()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("no partner A", "q_proj.lora_A.weight is missing"),
        ("no partner B", "q_proj.lora_B.weight is missing"),
        ("not a number", "q_proj has numbers that are not finite"),
        ("infinite", "q_proj has numbers that are not finite"),
        ("overflows", "q_proj has numbers that are not finite"),
        ("unknown", "model.norm.weight is no matrix of a LoRA"),
        ("dora", "lora_magnitude_vector is no matrix of a LoRA"),
        ("embedding", "lora_embedding_A is no matrix of a LoRA"),
        ("lm_head", "lm_head has a LoRA; only projections"),
        ("another prefix", "is no matrix of a LoRA"),
        ("another layer", "model.layers.2.self_attn.q_proj is of another base model; this one has 2 layers"),
        ("no such projection", "model.layers.0.mlp.q_proj has a LoRA, and the model has no such"),
        ("fused", "none of fused projections"),
        ("another width", "lora_A of model.layers.0.self_attn.q_proj has shape (8, 32)"),
        ("another height", "lora_B of model.layers.0.self_attn.q_proj has shape (32, 8)"),
        ("none", "no tensor is here"),
    ],
)
def test_tensors_that_are_not_served_are_refused_by_name(model: Path, tmp_path: Path, kind: str, named: str) -> None:
    lora = write_lora(tmp_path, model)
    path = lora / "adapter_model.safetensors"
    tensors = read_tensors(path)
    change(tensors, kind)
    write_safetensors(path, tensors, "float32")
    text = refusal(lora, model)
    assert named in text
    assert str(path) in text


def test_a_lora_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    wide = write_tiny_model(tmp_path / "wide", hidden=128, intermediate=256)
    assert "has shape (8, 128)" in refusal(write_lora(tmp_path / "lora", wide), model)


def test_files_that_are_missing_torn_or_pickles_are_refused(model: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora", model)
    path = lora / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert "torn" in refusal(lora, model)
    path.unlink()
    assert str(path) in refusal(lora, model)
    (lora / "adapter_model.bin").write_bytes(b"pickle")
    assert "adapter_model.bin: a pickle" in refusal(lora, model)
    path.write_bytes(whole)
    (lora / "adapter_config.json").write_text("{")
    assert "adapter_config.json" in refusal(lora, model)
    (lora / "adapter_config.json").unlink()
    assert "adapter_config.json" in refusal(lora, model)
    assert "nowhere" in refusal(tmp_path / "nowhere", model)


def test_a_lora_above_the_limits_is_refused_before_it_is_read(model: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path, model)
    assert "lora_rank, 7" in refusal(lora, model, most_rank=7)
    size_bytes = sum(4 * tensor.size for tensor in read_tensors(lora / "adapter_model.safetensors").values())
    assert "lora_bytes leaves" in refusal(lora, model, most_bytes=size_bytes - 1)
    read(lora, model, most_rank=8, most_bytes=size_bytes)


def test_a_lora_of_fused_projections_is_refused_and_of_the_others_read(tmp_path: Path) -> None:
    fused = write_tiny_model(tmp_path / "model", architecture="Phi3ForCausalLM")
    assert "no such projection" in refusal(write_lora(tmp_path / "all", fused), fused)
    layers = read(write_lora(tmp_path / "some", fused, targets=("o_proj", "down_proj")), fused)
    assert set(layers[0]) == {"o_proj", "down_proj"}


def test_a_lora_of_the_text_part_of_a_model_that_takes_images_is_read(tmp_path: Path) -> None:
    nested = write_tiny_model(tmp_path / "model", architecture="Gemma3ForConditionalGeneration")
    lora = write_lora(tmp_path / "lora", nested)
    path = lora / "adapter_model.safetensors"
    renamed = {
        name.replace("model.model.layers", "model.model.language_model.layers"): tensor
        for name, tensor in read_tensors(path).items()
    }
    write_safetensors(path, renamed, "float32")
    assert set(read(lora, nested)[1]) >= {"q_proj", "down_proj"}
    plain = read_tensors(write_lora(tmp_path / "plain", nested) / "adapter_model.safetensors")
    write_safetensors(path, plain | renamed, "float32")
    assert "has two LoRAs" in refusal(lora, nested)
