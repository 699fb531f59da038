"""Reads a GGUF model file as if it were a Hugging Face directory.

llama.cpp stores the rows of q and k of the llama architecture interleaved, because its rotation pairs neighbours;
Hugging Face pairs i with i + head_dim / 2. `floats` restores that order; other architectures are stored in it. Llama
3.1's frequency scaling is stored as a tensor of divisors; `config` finds the parameters that give these divisors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, through the `gguf` package.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize

from services.worker.model.architectures import ARCHITECTURES
from services.worker.model.tensor_header import Shape
from services.worker.native.gguf_tokenizer import GgufVocabulary
from services.worker.native.rope import Llama3Rope, PlainRope, frequencies
from services.worker.native.tensor_file import Floats
from shared.errors import ModelError
from shared.model_file import open_model_file

_ARCHITECTURES = {described.gguf: name for name, described in ARCHITECTURES.items() if described.gguf}
_OUTSIDE_LAYERS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYERS = {
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
_MAGIC = b"GGUF"
_ARRAY = int(GGUFValueType.ARRAY)  # looking up an enumeration's member for each entry takes long
_HEAD = struct.Struct("<4sIQQ")
"""The file's head: magic, version, number of tensors, number of fields."""
ENTRIES_LIMIT = 1 << 22
"""The most entries of all arrays of a file, and the most fields and tensors: the package makes an object of each. The
largest known vocabularies have about 1 M entries."""

T = TypeVar("T")


def is_gguf(path: Path) -> bool:
    """Say whether a file begins as a GGUF file; some have no suffix. False if it cannot be read."""
    try:
        with open_model_file(path) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (ModelError, OSError):
        return False


class _BoundedReader(GGUFReader):
    """The package's reader, which also compares each number of entries with the file's size before it uses it."""

    def __init__(self, path: Path) -> None:
        self._entries = 0
        super().__init__(path)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == _ARRAY:
            kind_bytes, count_bytes = 4, 8
            count = int(self._get(orig_offs + kind_bytes, np.uint64)[0])
            self._entries += count
            if count > self.data.size - orig_offs - kind_bytes - count_bytes or self._entries > ENTRIES_LIMIT:
                raise ValueError(f"an array of {count} entries")
        return super()._get_field_parts(orig_offs, raw_type)


class GgufFile:
    """A mapped GGUF file of a supported architecture."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raise ModelError if it is missing, torn, or of an unsupported architecture."""
        self.path = path
        with open_model_file(path) as file:
            head, size_bytes = file.read(_HEAD.size), os.fstat(file.fileno()).st_size
        torn = ModelError(f"{path}: torn or not a GGUF file ({size_bytes} bytes)")
        if len(head) < _HEAD.size or head[: len(_MAGIC)] != _MAGIC or sum(_HEAD.unpack(head)[2:]) > ENTRIES_LIMIT:
            raise torn
        try:
            reader = _BoundedReader(path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as wrong:
            raise ModelError(f"{path}: {wrong.strerror or wrong}") from None
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError):
            raise torn from None  # the package's messages are about its own arrays
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        parts = self._field("split.count", int, 1)
        if parts > 1:
            raise ModelError(
                f"{path}: part {self._field('split.no', int, 0) + 1} of {parts} of a model that was split;"
                " llama-gguf-split --merge joins the parts to one file, which can be served"
            )
        self._kind = self._field("general.architecture", str)
        if self._kind not in _ARCHITECTURES:
            raise ModelError(
                f"{path}: architecture {self._kind} is not supported in GGUF files; {', '.join(_ARCHITECTURES)} are."
                " docs/models.md lists what is served from Hugging Face directories"
            )

    def config(self) -> dict[str, Any]:
        """Return the content of config.json. Raise ModelError that names a missing or strange field."""
        head_count = self._of_kind("attention.head_count", int)
        hidden = self._of_kind("embedding_length", int)
        head_dim = self._of_kind("attention.key_length", int, hidden // max(head_count, 1))
        if self._of_kind("rope.dimension_count", int, head_dim) != head_dim:
            raise ModelError(f"{self.path}: rotary embeddings on only a part of each head are not supported")
        return {
            "architectures": [_ARCHITECTURES[self._kind]],
            "model_type": self._kind,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self._of_kind("feed_forward_length", int),
            "num_hidden_layers": self._of_kind("block_count", int),
            "num_attention_heads": head_count,
            "num_key_value_heads": self._of_kind("attention.head_count_kv", int, head_count),
            "head_dim": head_dim,
            "max_position_embeddings": self._of_kind("context_length", int),
            "rms_norm_eps": self._of_kind("attention.layer_norm_rms_epsilon", float),
            "rope_theta": self._of_kind("rope.freq_base", float, 10_000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "vocab_size": self._shape("token_embd.weight")[0],
            "bos_token_id": self._fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.eos_token_ids(),
            "torch_dtype": "float32",
        }

    def eos_token_ids(self) -> list[int]:
        """Return the tokens that the file names as the end of a text, a turn or a message."""
        named = (self._fields.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
        return sorted({token for token in named if token is not None})

    def vocabulary(self) -> GgufVocabulary:
        """Return the tokenizer's parts. Raise ModelError if the tokenizer is not a byte-level BPE."""
        kind = self._field("tokenizer.ggml.model", str)
        if kind != "gpt2":
            raise ModelError(f"{self.path}: tokenizer {kind} is not supported; gpt2 (byte-level BPE) is")
        tokens = self._field("tokenizer.ggml.tokens", list)
        return GgufVocabulary(
            where=str(self.path),
            splitter=self._field("tokenizer.ggml.pre", str, "" if self._kind == "llama" else "qwen2"),
            tokens=tokens,
            types=self._field("tokenizer.ggml.token_type", list, [1] * len(tokens)),
            merges=self._field("tokenizer.ggml.merges", list),
            bos=self._fields.get("tokenizer.ggml.bos_token_id"),
            eos=self._fields.get("tokenizer.ggml.eos_token_id"),
            adds_bos=self._fields.get("tokenizer.ggml.add_bos_token"),
            chat_template=self._field("tokenizer.chat_template", str, ""),
            tool_template=self._field("tokenizer.chat_template.tool_use", str, ""),
        )

    def check(self, shapes: dict[str, Shape]) -> None:
        """Raise ModelError if a tensor is missing or has another shape."""
        for name, shape in shapes.items():
            stored = self._shape(_stored_name(name))
            if stored != shape:
                raise ModelError(f"{self.path}: tensor {_stored_name(name)} has shape {stored}; expected {shape}")

    def floats(self, name: str) -> Floats:
        """Return a tensor by its Hugging Face name, dequantised, with rows in Hugging Face's order."""
        tensor = self._tensors[_stored_name(name)]
        try:
            floats: Floats = dequantize(tensor.data, tensor.tensor_type).reshape(self._shape(tensor.name))
        except (NotImplementedError, ValueError) as wrong:
            raise ModelError(f"{self.path}: tensor {tensor.name} ({tensor.tensor_type.name}): {wrong}") from None
        if self._kind == "llama" and ".q_proj." in name:
            return uninterleaved(floats, self._of_kind("attention.head_count", int))
        if self._kind == "llama" and ".k_proj." in name:
            heads = self._of_kind("attention.head_count", int)
            return uninterleaved(floats, self._of_kind("attention.head_count_kv", int, heads))
        return floats

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self._tensors:
            return self._llama3_scaling(head_dim)
        kind = self._of_kind("rope.scaling.type", str, "none")
        if kind == "none":
            return None
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self._of_kind("rope.scaling.factor", float)}
        if kind == "yarn":
            length = self._of_kind("context_length", int)
            scaling["original_max_position_embeddings"] = self._of_kind(
                "rope.scaling.original_context_length", int, length
            )
        return scaling

    def _llama3_scaling(self, head_dim: int) -> dict[str, Any]:
        """Return the parameters that give the stored divisors: those of Llama 3.1 to 3.3, the only ones supported."""
        theta = self._of_kind("rope.freq_base", float, 10_000.0)
        stored = dequantize(self._tensors["rope_freqs.weight"].data, self._tensors["rope_freqs.weight"].tensor_type)
        plain, _ = frequencies(PlainRope(theta), head_dim)
        factor = round(float(stored.max()), 3)
        guess = Llama3Rope(factor, 1.0, 4.0, 8192, theta)
        scaled, _ = frequencies(guess, head_dim)
        if stored.shape != plain.shape or not np.allclose(plain / scaled, stored, rtol=1e-4):
            raise ModelError(f"{self.path}: rope_freqs.weight is not Llama 3's scaling, the only one supported")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": guess.low_freq_factor,
            "high_freq_factor": guess.high_freq_factor,
            "original_max_position_embeddings": guess.original_max_position_embeddings,
        }

    def _shape(self, stored_name: str) -> Shape:
        tensor = self._tensors.get(stored_name)
        if tensor is None:
            raise ModelError(f"{self.path}: tensor {stored_name} is missing")
        return tuple(int(length) for length in reversed(tensor.shape))

    def _of_kind(self, name: str, kind: type[T], default: T | None = None) -> T:
        return self._field(f"{self._kind}.{name}", kind, default)

    def _field(self, name: str, kind: type[T], default: T | None = None) -> T:
        value = self._fields.get(name, default)
        if value is None:
            raise ModelError(f"{self.path}: the field {name} is missing")
        if not isinstance(value, kind):
            raise ModelError(f"{self.path}: the field {name} is a {type(value).__name__}; expected {kind.__name__}")
        return value


def uninterleaved(rows: Floats, heads: int) -> Floats:
    """Reorder each head's rows from llama.cpp's order (pairs) to Hugging Face's (first halves, then second halves)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _stored_name(name: str) -> str:
    """Return GGUF's name of a tensor: model.layers.3.mlp.up_proj.weight → blk.3.ffn_up.weight."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTSIDE_LAYERS:
        return f"{_OUTSIDE_LAYERS[stem]}.{kind}"
    number, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_IN_LAYERS[part]}.{kind}"
