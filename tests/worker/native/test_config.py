"""Tests of config.json: which fields are read and which settings are refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from services.worker.native.config import read_config
from services.worker.native.rope import LinearRope, Llama3Rope, PlainRope, YarnRope
from shared.errors import ModelError
from tests.tiny_model import write_tiny_model


def changed(directory: Path, changes: dict[str, Any], removed: str = "") -> Path:
    """Write a tiny model with a changed config.json."""
    write_tiny_model(directory)
    config = json.loads((directory / "config.json").read_text()) | changes
    config.pop(removed, None)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_shape_is_read(tmp_path: Path) -> None:
    config = read_config(write_tiny_model(tmp_path, heads=8, kv_heads=2, head_dim=16, intermediate=96, tied=False))
    assert (config.layers, config.hidden, config.intermediate, config.vocab) == (2, 64, 96, 320)
    assert (config.queries, config.keys, config.head_dim) == (128, 32, 16)
    assert (config.tied, config.qkv_bias, config.output_bias) == (False, False, False)
    assert config.rope == PlainRope(10_000.0)
    assert config.context_length == 2048


def test_qwen2_always_has_biases_on_q_k_and_v_only(tmp_path: Path) -> None:
    config = read_config(write_tiny_model(tmp_path, architecture="Qwen2ForCausalLM"))
    assert (config.qkv_bias, config.output_bias) == (True, False)


def test_missing_optional_fields_have_transformers_defaults(tmp_path: Path) -> None:
    config = read_config(changed(tmp_path, {"num_key_value_heads": None, "head_dim": None}, "tie_word_embeddings"))
    assert (config.kv_heads, config.head_dim, config.tied) == (4, 16, False)


def test_the_ends_of_an_answer_come_from_generation_config_first(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    assert read_config(tmp_path).eos_token_ids == (0, 2)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").unlink()
    assert read_config(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("parameters", "rope", "context_length"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, PlainRope(5e5), 2048),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearRope(2.0, 10_000.0), 2048),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 512,
                }
            },
            Llama3Rope(8.0, 1.0, 4.0, 512, 10_000.0),
            2048,
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
            YarnRope(4.0, 2048, 10_000.0),
            8192,
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": None}, "original_max_position_embeddings": 512},
            YarnRope(4.0, 512, 10_000.0),
            2048,
        ),
    ],
)
def test_rope_parameters_of_old_and_new_files(
    tmp_path: Path, parameters: dict[str, Any], rope: object, context_length: int
) -> None:
    config = read_config(changed(tmp_path, parameters))
    assert config.rope == rope
    assert config.context_length == context_length


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architecture MistralForCausalLM is not supported"),
        ({"architectures": []}, "architecture none is not supported"),
        ({"hidden_size": "64"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"is_causal": False}, "is_causal is False"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"num_hidden_layers": 10**9}, "layers is 1000000000; expected at most"),
        ({"num_attention_heads": 0}, "heads is 0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"vocab_size": -1}, "vocab is -1"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": ["a"]}}, "rope type .* is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling linear: .*`factor`"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": "2"}},
            "original_max_position_.* is '2'",
        ),
        ({"rope_theta": -1}, "rope_theta is -1"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=re.escape(str(tmp_path / "config.json")) + ": " + complaint):
        read_config(changed(tmp_path, changes))


@pytest.mark.parametrize("field", ["architectures", "hidden_size", "vocab_size", "rms_norm_eps"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: .*`{field}`"):
        read_config(changed(tmp_path, {}, field))


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "MistralForCausalLM"])
def test_an_architecture_is_refused_before_its_other_fields_are_read(tmp_path: Path, architecture: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "n_embd": 768}))
    with pytest.raises(ModelError, match=rf"config\.json: architecture {architecture} is not supported; LlamaFor"):
        read_config(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_pipe_in_the_place_of_a_file_is_named_at_once(tmp_path: Path, file: str) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / file).unlink()
    os.mkfifo(tmp_path / file)
    with pytest.raises(ModelError, match=rf"{file}: not a regular file"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_torn_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json: "):
        read_config(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        read_config(tmp_path)


def test_end_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 320]}')
    with pytest.raises(ModelError, match=r"eos_token_id \(2, 320\) is outside the vocabulary of 320"):
        read_config(tmp_path)
