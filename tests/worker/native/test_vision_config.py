"""Tests of how a LLaVA model's files say how it sees: what is read, and what is refused by name."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.worker.native.config import read_config
from services.worker.native.vision_config import vision_shapes
from services.worker.native.weights import Checkpoint, load_weights
from shared.errors import ModelError
from shared.messages.cards import ImageInput
from tests.tiny_model import CLIP, llava_name, write_safetensors, write_tiny_model
from tests.worker.native.golden.cases import CASES
from tests.worker.native.merged import read_tensors

LLAVA_7B: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "model_type": "llava",
    "projector_hidden_act": "gelu",
    "text_config": {
        **{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama"},
        **{"rms_norm_eps": 1e-05, "vocab_size": 32064},
    },
    "tie_word_embeddings": False,
    "vision_config": {
        **{"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model"},
        **{"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768},
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
PROCESSOR_7B: dict[str, Any] = {
    **{"crop_size": {"height": 336, "width": 336}, "do_center_crop": True, "do_convert_rgb": True, "resample": 3},
    **{"do_normalize": True, "do_rescale": True, "do_resize": True, "image_processor_type": "CLIPImageProcessor"},
    **{"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
    **{"rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 336}},
}


def written(directory: Path, config: dict[str, Any], processor: dict[str, Any] | None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def test_llava_1_5_7b_is_read_as_its_files_have_it(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, LLAVA_7B, PROCESSOR_7B))
    assert (config.layers, config.hidden, config.vocab, config.context_length) == (32, 4096, 32064, 4096)
    assert config.vision is not None
    assert config.vision.input == ImageInput(32000, 576, 336, 336, 336, "BICUBIC")
    assert (config.vision.features, config.vision.layers, config.vision.activation) == ((23,), 23, "quick_gelu")
    # The tower's 304.3 million, less its last layer and its last norm, and 21 million of the projector.
    assert sum(prod(shape) for shape in vision_shapes(config.vision, 4096).values()) == 311_888_896


def test_a_processor_may_be_nested_and_resize_whatever_the_shape(tmp_path: Path) -> None:
    nested = {"image_processor": {**PROCESSOR_7B, "size": {"height": 336, "width": 336}, "crop_size": None}}
    nested["image_processor"]["do_center_crop"] = None
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    config = read_config(written(tmp_path, LLAVA_7B, None))
    assert config.vision is not None
    assert config.vision.input.resize == 0


@pytest.mark.parametrize(
    ("config", "processor", "why"),
    [
        ({"text_config": {"model_type": "gemma"}}, {}, "text_config.model_type is gemma; llama, mistral, qwen2 are"),
        (
            {"vision_config": {"model_type": "pixtral"}},
            {},
            "vision_config.model_type is pixtral; clip_vision_model and",
        ),
        ({"vision_config": None}, {}, "vision_config"),
        ({"vision_config": {**CLIP, "hidden_act": "relu"}}, {}, "vision_config.hidden_act is relu"),
        ({"vision_config": {**CLIP, "num_channels": 1}}, {}, "num_channels is 1; only 3"),
        ({"vision_config": {**CLIP, "num_attention_heads": 5}}, {}, "5 heads cannot share"),
        ({"vision_config": {**CLIP, "num_hidden_layers": 0}}, {}, "num_hidden_layers is 0"),
        ({"vision_config": {**CLIP, "patch_size": 0}}, {}, "patch_size is 0"),
        ({"vision_config": {**CLIP, "image_size": [28, 28]}}, {}, "image_size"),
        ({"vision_config": {**CLIP, "patch_size": 29}}, {}, "no position"),
        ({"vision_feature_layer": 25}, {}, "vision_feature_layer is 25; the tower has 24 layers"),
        ({"vision_feature_layer": []}, {}, "vision_feature_layer is"),
        ({"vision_feature_select_strategy": "cls"}, {}, "vision_feature_select_strategy"),
        ({"projector_hidden_act": "silu"}, {}, "projector_hidden_act is silu"),
        ({"image_token_index": 40_000}, {}, "image_token_id is 40000"),
        ({}, None, "preprocessor_config.json: missing"),
        ({}, {"do_pad": True}, "do_pad is True; only false"),
        ({}, {"do_resize": False}, "do_resize is False; only true"),
        ({}, {"resample": 9}, "resample is 9"),
        ({}, {"image_std": [0.5, 0.0, 0.5]}, "image_std above 0"),
        ({}, {"image_mean": [0.5]}, "image_mean"),
        ({}, {"crop_size": {"height": 224, "width": 224}}, "crop_size is .* takes 336 by 336"),
        ({}, {"do_center_crop": False}, "size is .* takes 336 by 336"),
        ({}, {"size": {"longest_edge": 336}}, "only a shortest_edge"),
    ],
)
def test_what_is_not_built_is_refused_by_file_and_field(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any] | None, why: str
) -> None:
    changed = None if processor is None else PROCESSOR_7B | processor
    with pytest.raises(ModelError, match=why) as refused:
        read_config(written(tmp_path, LLAVA_7B | config, changed))
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_either_part_may_say_that_the_embeddings_are_tied(tmp_path: Path) -> None:
    config = {**LLAVA_7B, "text_config": {**LLAVA_7B["text_config"], "tie_word_embeddings": True}}
    assert read_config(written(tmp_path, config, PROCESSOR_7B)).tied
    assert not read_config(written(tmp_path, LLAVA_7B, PROCESSOR_7B)).tied


@pytest.mark.parametrize("tower", ["model.vision_tower.", "model.vision_tower.vision_model."])
def test_the_names_of_new_files_give_the_weights_of_old_ones(tmp_path: Path, tower: str) -> None:
    case = CASES["llava of CLIP and Llama"]
    old, new = (write_tiny_model(tmp_path / name, **case) for name in ("old", "new"))
    weights = read_tensors(old / "model.safetensors")
    assert {llava_name(name) for name in Checkpoint(old, read_config(old)).shapes} == weights.keys()
    renamed = {
        name.replace("vision_tower.vision_model.", tower)
        .replace("multi_modal", "model.multi_modal")
        .replace("language_model.lm_head", "lm_head")
        .replace("language_model.model", "model.language_model"): tensor
        for name, tensor in weights.items()
    }
    write_safetensors(new / "model.safetensors", renamed, "float32")
    ours, theirs = Checkpoint(new, read_config(new)), Checkpoint(old, read_config(old))
    for name in theirs.shapes:
        np.testing.assert_array_equal(ours.floats(name), theirs.floats(name))
    np.testing.assert_array_equal(load_weights(new, read_config(new)).head, load_weights(old, read_config(old)).head)


def test_a_tower_of_another_shape_is_refused_by_its_tensors_name(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, **CASES["llava of CLIP and Llama"])
    config = json.loads((directory / "config.json").read_text())
    config["vision_config"]["intermediate_size"] = 64
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"tensor vision_tower\.encoder\.layers\.0\.mlp\.fc1\.weight has shape"):
        Checkpoint(directory, read_config(directory))
