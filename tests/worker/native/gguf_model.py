"""Writes a small model as a GGUF file the way llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from services.worker.native.config import ModelConfig, read_config
from services.worker.native.rope import NoRope
from services.worker.native.tensor_file import Floats
from services.worker.native.weights import Checkpoint

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    source: Path,
    *,
    pre: str = "smollm",
    quantised: GGMLQuantizationType = GGMLQuantizationType.F32,
    fields: dict[str, Any] | None = None,
    extra_tensors: dict[str, Floats] | None = None,
    left_out: tuple[str, ...] = (),
) -> Path:
    """Write the Hugging Face directory `source` as one GGUF file; `fields` are added or replaced."""
    config = read_config(source)
    kind = json.loads((source / "config.json").read_text())["model_type"]
    writer = GGUFWriter(path, kind)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    if config.head_dim * config.heads != config.hidden:
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    assert not isinstance(config.rope, NoRope)
    writer.add_rope_freq_base(config.rope.rope_theta)
    _add_tokenizer(writer, source, pre)
    for name, value in (fields or {}).items():
        writer.kv_data[0].pop(name, None)
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_string(name, value)
    checkpoint = Checkpoint(source, config)
    tensors = {_stored_name(name): _stored(checkpoint, name, config, kind) for name in checkpoint.shapes}
    for name, tensor in {**tensors, **(extra_tensors or {})}.items():
        if name in left_out:
            continue
        if tensor.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
        else:
            writer.add_tensor(name, quantize(np.ascontiguousarray(tensor), quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(checkpoint: Checkpoint, name: str, config: ModelConfig, kind: str) -> Floats:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py, on q and k of llama alone."""
    tensor = checkpoint.floats(name)
    for part, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
        if kind == "llama" and part in name:
            return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def _stored_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in outside:
        return f"{outside[stem]}.{kind}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{NAMES[part]}.{kind}"


def _add_tokenizer(writer: GGUFWriter, source: Path, pre: str) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(json.loads((source / "tokenizer_config.json").read_text())["chat_template"])
