"""Tests of config.json: which fields are read and which settings are refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from services.worker.native.config import ModelConfig, read_config
from services.worker.native.rope import LinearRope, Llama3Rope, LongRope, NoRope, PlainRope, YarnRope
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
        ({"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM is not supported"),
        ({"architectures": []}, "architecture none is not supported"),
        ({"hidden_size": "64"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config says that .* quantised \(awq\)"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"is_causal": False}, "is_causal is False"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"num_hidden_layers": 10**9}, "layers is 1000000000; expected at most"),
        ({"num_attention_heads": 0}, "heads is 0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"vocab_size": -1}, "vocab is -1"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling longrope: .*`short_factor`"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 8, "factor": -1}}, "factor is -1"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [0] * 8}}, "short_factor has a number that is not"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 7}},
            "short_factor has 7 numbers; expected 8",
        ),
        ({"rope_scaling": {"rope_type": "none"}}, "rope type 'none' is not supported"),
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


def test_a_file_without_architectures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: .*`architectures`"):
        read_config(changed(tmp_path, {}, "architectures"))


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "Qwen3MoeForCausalLM", "Mistral3ForConditionalGeneration"])
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


def described(directory: Path, architecture: str, changes: dict[str, Any], **shape: Any) -> ModelConfig:
    """Read the config.json of a tiny model of an architecture, with changes."""
    write_tiny_model(directory, architecture=architecture, **shape)
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory)


def test_a_setting_that_the_architecture_does_not_have_is_passed_over_as_transformers_does(tmp_path: Path) -> None:
    changes = {
        "sliding_window": 8,
        "layer_types": ["?"],
        "residual_multiplier": "no number",
        "partial_rotary_factor": 0,
    }
    assert described(tmp_path / "changed", "LlamaForCausalLM", changes) == read_config(write_tiny_model(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("MistralForCausalLM", {"sliding_window": 2048}, ()),  # all of the context
        ("MistralForCausalLM", {"sliding_window": 2047}, (2047,) * 4),
        ("MistralForCausalLM", {"max_position_embeddings": 8192}, (4096,) * 4),  # transformers' default
        ("Qwen3ForCausalLM", {"sliding_window": 9, "max_window_layers": 1}, ()),
        ("Qwen3ForCausalLM", {"sliding_window": 9, "max_window_layers": 1, "use_sliding_window": True}, (0, 9, 9, 9)),
        ("Gemma2ForCausalLM", {"sliding_window": 9}, (9, 0, 9, 0)),
        ("Gemma2ForCausalLM", {"sliding_window": 9, "layer_types": ["full_attention"] * 4}, ()),
        ("Gemma3ForCausalLM", {"sliding_window": 9}, (9, 9, 9, 9)),
        ("Gemma3ForCausalLM", {"sliding_window": 9, "sliding_window_pattern": 3}, (9, 9, 0, 9)),
        ("Phi3ForCausalLM", {"sliding_window": 9}, (9, 9, 9, 9)),
    ],
)
def test_each_layer_has_its_window(
    tmp_path: Path, architecture: str, changes: dict[str, Any], windows: tuple[int, ...]
) -> None:
    config = described(tmp_path, architecture, changes, layers=4)
    assert config.windows == windows
    assert config.window_of(3) == (windows[3] if windows else 0)


@pytest.mark.parametrize(
    ("architecture", "changes", "complaint"),
    [
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window is 0; expected a positive number"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types must say full_attention or sliding"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention", "mamba"]}, "layer_types must say full_attention or"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation is gelu; only gelu_pytorch_tanh is"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": -1}, "final_logit_softcapping is -1"),
        ("Gemma3ForCausalLM", {"rope_local_base_freq": -1}, "rope_theta is -1"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling is 0"),
        ("GraniteForCausalLM", {"mlp_bias": True}, "mlp_bias is True"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.45}, "partial_rotary_factor rotates 7 of 16 elements"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 2}, "partial_rotary_factor rotates 32 of 16 elements"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "default", "partial_rotary_factor": "all"}},
            "partial_rotary_fac",
        ),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers must have a number for each of 2 layers"),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, "use_sliding_window is True; only False"),
        ("MistralForCausalLM", {"num_hidden_layers": 10**12}, "layers is 1000000000000; expected at most"),
    ],
)
def test_settings_of_some_architectures_are_refused_by_name(
    tmp_path: Path, architecture: str, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path / 'config.json'}: {complaint}")):
        described(tmp_path, architecture, changes)


def test_layers_that_slide_have_a_rotation_of_their_own_as_transformers_4_and_5_write_it(tmp_path: Path) -> None:
    four = {
        **{"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        **{"sliding_window_pattern": 2, "sliding_window": 9},
    }
    five = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
    }
    config = described(tmp_path / "4", "Gemma3ForCausalLM", four)
    assert config == described(tmp_path / "5", "Gemma3ForCausalLM", five)
    assert config.ropes == (LinearRope(8.0, 1e6), PlainRope(1e4))
    assert [config.rope_of(layer) for layer in range(2)] == [1, 0]


def test_a_model_that_takes_images_has_its_settings_in_text_config(tmp_path: Path) -> None:
    flat = described(tmp_path / "flat", "Gemma3ForCausalLM", {})
    assert described(tmp_path / "nested", "Gemma3ForConditionalGeneration", {}) == flat
    complaint = re.escape("config.json: text_config is missing; it has the settings")
    wrong: tuple[Any, ...] = (None, [], "text")
    for text in wrong:
        with pytest.raises(ModelError, match=complaint):
            described(tmp_path / "nested", "Gemma3ForConditionalGeneration", {"text_config": text})
    with pytest.raises(ModelError, match=r"config\.json: quantization_config says"):
        described(tmp_path, "Gemma3ForConditionalGeneration", {"quantization_config": {"quant_method": "awq"}})


def test_every_fourth_layer_of_smollm3_has_no_rotation_if_no_list_says_otherwise(tmp_path: Path) -> None:
    config = described(tmp_path, "SmolLM3ForCausalLM", {}, layers=8)
    assert [config.rope_of(layer) for layer in range(8)] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert config.ropes[1] == NoRope()


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_serves_the_original_length_with_the_short_factors(tmp_path: Path, kind: str) -> None:
    scaling = {"type": kind, "short_factor": [1.0] * 6, "long_factor": [9.0] * 6}
    changes = {"rope_scaling": scaling, "original_max_position_embeddings": 512, "partial_rotary_factor": 0.75}
    config = described(tmp_path, "Phi3ForCausalLM", changes)
    assert config.context_length == 512
    assert config.rotated == 12
    assert config.rope == LongRope((1.0,) * 6, 4.0, 512)
