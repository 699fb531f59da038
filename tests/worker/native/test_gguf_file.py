"""GGUF files written as llama.cpp writes them, against the directories they came from."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from services.worker.native.config import read_config
from services.worker.native.gguf_file import ENTRIES_LIMIT, GgufFile
from services.worker.native.prepare import prepare
from services.worker.native.rope import Llama3Rope, PlainRope, YarnRope, frequencies
from services.worker.native.weights import Checkpoint
from shared.errors import ModelError
from shared.model_files.templates import read_templates
from tests.tiny_model import write_tiny_model
from tests.worker.native.gguf_model import write_gguf


def converted(gguf: Path) -> Path:
    return prepare(gguf, gguf.parent / "cache", lambda _: None)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tied": False, "bias": True, "heads": 8},
        {"architecture": "Qwen2ForCausalLM", "tied": False},
        {"architecture": "Qwen2ForCausalLM", "kv_heads": 1, "rope_theta": 1e6},
        {"architecture": "Qwen3ForCausalLM", "head_dim": 32, "rope_theta": 1e6},
        {"architecture": "Qwen3ForCausalLM", "bias": True, "tied": False},
    ],
)
def test_a_gguf_file_becomes_the_directory_it_was_made_of(tmp_path: Path, arguments: dict[str, Any]) -> None:
    source = write_tiny_model(tmp_path / "source", **arguments)
    directory = converted(write_gguf(tmp_path / "x.gguf", source))
    expected, config = read_config(source), read_config(directory)
    assert config.norm_epsilon == pytest.approx(expected.norm_epsilon)  # float32 in the file
    for field in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "context_length"):
        assert getattr(config, field) == getattr(expected, field)
    assert (config.tied, config.qkv_bias, config.output_bias) == (
        expected.tied,
        expected.qkv_bias,
        expected.output_bias,
    )
    assert config.rope == expected.rope
    original, copy = Checkpoint(source, expected), Checkpoint(directory, config)
    for name in original.shapes:
        np.testing.assert_array_equal(original.floats(name), copy.floats(name), err_msg=name)
    assert copy.mapped


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_are_near_the_originals(tmp_path: Path, kind: str) -> None:
    source = write_tiny_model(tmp_path / "source")
    directory = converted(write_gguf(tmp_path / "x.gguf", source, quantised=GGMLQuantizationType[kind]))
    original, copy = (Checkpoint(place, read_config(place)) for place in (source, directory))
    for name in original.shapes:
        error = np.abs(original.floats(name) - copy.floats(name)).max()
        assert error < 0.15 * np.abs(original.floats(name)).max(), name


def test_the_chat_template_and_the_ends_of_an_answer_come_along(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "x.gguf", write_tiny_model(tmp_path / "source"))
    assert read_config(converted(gguf)).eos_token_ids == (0, 2)  # eos as stored, and <|im_end|> by its text
    fields = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}
    named = write_gguf(tmp_path / "y.gguf", tmp_path / "source", fields=fields)
    assert read_config(converted(named)).eos_token_ids == (0, 5, 7, 2)
    assert "<|im_start|>" in GgufFile(gguf).vocabulary().tokenizer_config()["chat_template"]


def test_the_template_of_chats_with_tools_comes_along(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    own = json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
    for name, tools, found in (("both", "{{ tools }}", "{{ tools }}"), ("one", "", own)):
        fields = {"tokenizer.chat_template.tool_use": tools}
        directory = converted(write_gguf(tmp_path / f"{name}.gguf", source, fields=fields))
        templates = read_templates(directory)
        assert (templates.chat, templates.tools) == (own, found)


def test_a_part_of_a_split_file_is_named_before_anything_that_it_lacks(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    part = write_gguf(
        tmp_path / "x.gguf", source, fields={"split.no": 0, "split.count": 2}, left_out=("output_norm.weight",)
    )
    with pytest.raises(ModelError, match=r"x\.gguf: part 1 of 2 of a model that was split"):
        GgufFile(part)
    whole = write_gguf(tmp_path / "y.gguf", source, fields={"split.no": 0, "split.count": 1})
    assert GgufFile(whole).config()["vocab_size"] == 320


def test_a_qwen_file_without_the_name_of_its_splitting_has_qwens(tmp_path: Path) -> None:
    for architecture, expected in (
        ("Qwen2ForCausalLM", "qwen2"),
        ("Qwen3ForCausalLM", "qwen2"),
        ("LlamaForCausalLM", ""),
    ):
        source = write_tiny_model(tmp_path / architecture, architecture=architecture)
        file = write_gguf(tmp_path / f"{architecture}.gguf", source, pre="")
        assert GgufFile(file).vocabulary().splitter == expected


def test_llama_3_scaling_is_derived_from_its_divisors(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", hidden=256, rope_theta=500_000.0)
    scaling = Llama3Rope(32.0, 1.0, 4.0, 8192, 500_000.0)
    divisors = frequencies(PlainRope(500_000.0), 64)[0] / frequencies(scaling, 64)[0]
    stored = {"rope_freqs.weight": divisors.astype(np.float32)}
    assert read_config(converted(write_gguf(tmp_path / "x.gguf", source, extra_tensors=stored))).rope == scaling
    strange = {"rope_freqs.weight": np.linspace(1, 3, 32, dtype=np.float32)}
    with pytest.raises(ModelError, match=r"y\.gguf: rope_freqs\.weight is not Llama 3's scaling"):
        converted(write_gguf(tmp_path / "y.gguf", source, extra_tensors=strange))


def test_yarn_scaling_is_read_from_the_metadata(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", architecture="Qwen2ForCausalLM", context_length=4096)
    fields = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 1024,
    }
    config = read_config(converted(write_gguf(tmp_path / "x.gguf", source, fields=fields)))
    assert config.rope == YarnRope(4.0, 1024, 10_000.0)
    assert config.context_length == 4096


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            {"fields": {"general.architecture": "gemma"}},
            "architecture gemma is not supported in GGUF files; llama, qwen2, qwen3 are. docs/models.md lists",
        ),
        (
            {"fields": {"split.no": 1, "split.count": 3}},
            "part 2 of 3 of a model that was split; llama-gguf-split --merge",
        ),
        ({"fields": {"tokenizer.ggml.model": "llama"}}, "tokenizer llama is not supported"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"fields": {"llama.block_count": "two"}}, "the field llama.block_count is a str; expected int"),
        ({"fields": {"llama.block_count": 3}}, "tensor blk.2.attn_norm.weight is missing"),
        ({"fields": {"llama.feed_forward_length": 64}}, "ffn_gate.weight has shape (128, 64); expected (64, 64)"),
        ({"fields": {"llama.rope.dimension_count": 8}}, "a part of each head"),
        ({"fields": {"llama.attention.head_count_kv": 3}}, "4 attention heads cannot share 3"),
        ({"fields": {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}}, "scaling longrope"),
        ({"left_out": ("token_embd.weight",)}, "tensor token_embd.weight is missing"),
        ({"fields": {"tokenizer.ggml.bos_token_id": 999}}, "bos_token_id 999 is not in the vocabulary of 320"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, arguments: dict[str, Any], complaint: str) -> None:
    gguf = write_gguf(tmp_path / "x.gguf", write_tiny_model(tmp_path / "source"), **arguments)
    with pytest.raises(ModelError, match=re.escape(str(gguf)) + ".*" + re.escape(complaint)):
        converted(gguf)
    assert not list((tmp_path / "cache").glob("x-*/"))


@pytest.mark.parametrize("share", [0.0, 0.00005, 0.01, 0.1, 0.5, 0.999])
def test_a_torn_file_is_named(tmp_path: Path, share: float) -> None:
    gguf = write_gguf(tmp_path / "x.gguf", write_tiny_model(tmp_path / "source"))
    content = gguf.read_bytes()
    gguf.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match=re.escape(str(gguf)) + r": torn or not a GGUF file \(\d+ bytes\)$"):
        converted(gguf)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def array(kind: int, count: int) -> bytes:
    """Return the head of an array field `a`, without its entries."""
    return text(b"a") + struct.pack("<IIQ", 9, kind, count)


LIES = {
    "an endless array": (1, 0, array(0, 1 << 62) + b"x" * 100),
    "one entry too many": (1, 0, array(0, 101) + b"x" * 100),
    "endless texts": (1, 0, array(8, 1 << 40) + b"x" * 100),
    "arrays in arrays": (1, 0, array(9, 1) + struct.pack("<IQ", 9, 1) * 100_000),
    "an endless array in an array": (1, 0, array(9, 2) + struct.pack("<IQ", 0, 1 << 62) + b"x" * 100),
    "more entries than are read": (1, 0, array(0, ENTRIES_LIMIT + 1) + b"x" * (ENTRIES_LIMIT + 1)),
    "more fields than are read": (ENTRIES_LIMIT + 1, 0, b"x" * 100),
    "endless fields": (1 << 63, 0, b"x" * 100),
    "endless tensors": (0, 1 << 63, b"x" * 100),
    "an unknown type": (1, 0, text(b"a") + struct.pack("<I", 999)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_number_of_entries_larger_than_the_file_is_refused(tmp_path: Path, lie: str) -> None:
    fields, tensors, body = LIES[lie]
    (tmp_path / "x.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, tensors, fields) + body)
    with pytest.raises(ModelError, match=r"x\.gguf: torn or not a GGUF file \(\d+ bytes\)$"):
        GgufFile(tmp_path / "x.gguf")


def test_a_pipe_is_named_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=r"x\.gguf: not a regular file"):
        GgufFile(tmp_path / "x.gguf")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf: No such file"):
        GgufFile(tmp_path / "none.gguf")
