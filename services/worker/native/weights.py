"""Maps a directory's weights and checks their names and shapes against config.json.

Names and shapes are those of transformers' classes. Matrices are (outputs, inputs), row-major, as stored, so that a
float32 file is used in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from services.worker.model.architectures import NormPlaces
from services.worker.model.tensor_header import ITEM_BYTES, Shape, TensorEntry
from services.worker.native.config import ModelConfig
from services.worker.native.linear import Array
from services.worker.native.tensor_file import Floats, TensorFile
from services.worker.native.vision_config import vision_shapes
from shared.errors import ModelError
from shared.model_file import LIST_LIMIT_BYTES, read_model_json

PIECES = 16
"""How many pieces of a tensor are covered."""
PIECE_BYTES = 4096
_ARITHMETIC = b"headrace 1"
"""The version of the decoder's arithmetic. Change it whenever the decoder computes something else."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer; a bias or norm is None if the model does not have it."""

    input_norm: Array | None
    """The norm before attention."""
    q: Array
    k: Array
    v: Array
    o: Array
    q_bias: Array | None
    k_bias: Array | None
    v_bias: Array | None
    o_bias: Array | None
    output_norm: Array | None
    """The norm before the feed-forward part."""
    gate: Array
    up: Array
    down: Array
    q_norm: Array | None = None
    k_norm: Array | None = None
    attended_norm: Array | None = None
    """The norm of what attention adds to the residual stream."""
    fed_norm: Array | None = None
    """The norm of what the feed-forward part adds."""


NORM_NAMES: dict[NormPlaces, dict[str, str]] = {
    "before": {"input_norm": "input_layernorm", "output_norm": "post_attention_layernorm"},
    "around": {
        "input_norm": "input_layernorm",
        "attended_norm": "post_attention_layernorm",
        "output_norm": "pre_feedforward_layernorm",
        "fed_norm": "post_feedforward_layernorm",
    },
    "after": {"attended_norm": "post_attention_layernorm", "fed_norm": "post_feedforward_layernorm"},
}
"""The fields of `Layer` that have a layer's norms, and the names of their tensors."""


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
"""Beginnings of names in files of models that take images → what stands there in the names of `tensor_shapes`."""


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a decoder's weights."""

    embedding: Array
    layers: tuple[Layer, ...]
    norm: Array
    head: Array
    """The output projection, (vocab, hidden); the embedding itself if they are tied."""
    head_part: Array | None = None
    """The rows of it that a rank of a tensor-parallel group computes. None if there is one rank."""


class _Index(Struct, frozen=True):
    weight_map: dict[str, str]


class Checkpoint:
    """The safetensors file of a directory, or several with their index, checked against the config."""

    def __init__(self, directory: Path, config: ModelConfig, file: Path | None = None) -> None:
        """Map and check the files, or `file` in place of those. Raise ModelError that names the file, the tensor and
        what was expected."""
        self._norm_offset = config.norm_offset
        self._files, self._where = _open(checkpoint_files(directory) if file is None else [file])
        self._stored = {text_name(stored): stored for stored in self._where}
        if config.tied and HEAD in self._stored:  # a tied model may be stored by its head alone
            self._stored.setdefault(EMBEDDING, self._stored[HEAD])
        self.tied = config.tied and not self._has_other_head((config.vocab, config.hidden))
        """Whether the output projection is the embedding."""
        self.shapes = tensor_shapes(config)
        if not self.tied:
            self.shapes[HEAD] = self.shapes[EMBEDDING]
        for name, shape in self.shapes.items():
            stored = self._stored.get(name, name)
            where = self._where.get(stored)
            if where is None:
                raise ModelError(
                    f"{directory}: tensor {name} is in no safetensors file; expected one with shape {shape}"
                )
            entry = self._files[where].entries.get(stored)
            if entry is None:
                raise ModelError(f"{directory / where}: tensor {stored} is missing; the index says it is here")
            if entry.shape != shape:
                raise ModelError(f"{directory / where}: tensor {name} has shape {entry.shape}; expected {shape}")
            if entry.dtype not in ITEM_BYTES:
                raise ModelError(
                    f"{directory / where}: tensor {name} is {entry.dtype}; expected float32, float16 or bfloat16"
                )

    def _has_other_head(self, shape: Shape) -> bool:
        """Return whether a model that says that it is tied has two different matrices. Then transformers uses both."""
        stored = [self._stored.get(name, "") for name in (EMBEDDING, HEAD)]
        files = [self._files.get(self._where.get(name, "")) for name in stored]
        entries = [None if file is None else file.entries.get(name) for file, name in zip(files, stored, strict=True)]
        if any(entry is None or entry.shape != shape or entry.dtype not in ITEM_BYTES for entry in entries):
            return False
        if stored[0] == stored[1]:
            return False
        pieces = zip(*(self.float_pieces(name) for name in (EMBEDDING, HEAD)), strict=True)
        return not all(np.array_equal(*pair) for pair in pieces)

    @property
    def mapped(self) -> bool:
        """Whether every tensor is float32 and so is used in place."""
        return all(self.entry(name).dtype == "F32" for name in self.shapes)

    def entry(self, name: str) -> TensorEntry:
        """Return how one tensor is stored."""
        stored = self._stored[name]
        return self._files[self._where[stored]].entries[stored]

    def pieces(self, name: str, most: int, piece_bytes: int) -> Iterator[memoryview]:
        """Yield pieces of one tensor's bytes, as `TensorFile.pieces` does."""
        stored = self._stored[name]
        return self._files[self._where[stored]].pieces(stored, most, piece_bytes)

    def float_pieces(self, name: str) -> Iterator[Floats]:
        """Yield the elements of one tensor as `TensorFile.float_pieces` does."""
        stored = self._stored[name]
        return self._files[self._where[stored]].float_pieces(stored)

    def floats(self, name: str) -> Floats:
        """Return one tensor as float32."""
        stored = self._stored[name]
        return self._files[self._where[stored]].floats(stored)

    def norm(self, name: str) -> Floats:
        """Return the factors of one norm."""
        stored = self.floats(name)
        return stored + np.float32(self._norm_offset) if self._norm_offset else stored


def load_weights(directory: Path, config: ModelConfig, file: Path | None = None) -> Weights:
    """Map a directory's weights, or those of `file`; those that are not float32 are converted. Raise ModelError."""
    checkpoint = Checkpoint(directory, config, file)

    def optional(name: str, read: Callable[[str], Floats] = checkpoint.floats) -> Floats | None:
        return read(name) if name in checkpoint.shapes else None

    def parts(stem: str, fused: str, names: Sequence[str], rows: Sequence[int]) -> list[Floats]:
        """Return the matrices of `names`, which may be stored as one, one above the other."""
        if config.fused:
            return np.split(checkpoint.floats(f"{stem}{fused}.weight"), np.cumsum(rows)[:-1])
        return [checkpoint.floats(f"{stem}{name}.weight") for name in names]

    def layer(number: int) -> Layer:
        stem = f"model.layers.{number}."
        attention = f"{stem}self_attn."
        q, k, v = parts(
            attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), (config.queries, config.keys, config.keys)
        )
        gate, up = parts(f"{stem}mlp.", "gate_up_proj", ("gate_proj", "up_proj"), (config.intermediate,) * 2)
        norms = {field: checkpoint.norm(f"{stem}{name}.weight") for field, name in NORM_NAMES[config.norms].items()}
        return Layer(
            input_norm=norms.get("input_norm"),
            q=q,
            k=k,
            v=v,
            o=checkpoint.floats(f"{attention}o_proj.weight"),
            q_bias=optional(f"{attention}q_proj.bias"),
            k_bias=optional(f"{attention}k_proj.bias"),
            v_bias=optional(f"{attention}v_proj.bias"),
            o_bias=optional(f"{attention}o_proj.bias"),
            output_norm=norms.get("output_norm"),
            gate=gate,
            up=up,
            down=checkpoint.floats(f"{stem}mlp.down_proj.weight"),
            q_norm=optional(f"{attention}q_norm.weight", checkpoint.norm),
            k_norm=optional(f"{attention}k_norm.weight", checkpoint.norm),
            attended_norm=norms.get("attended_norm"),
            fed_norm=norms.get("fed_norm"),
        )

    embedding = checkpoint.floats(EMBEDDING)
    return Weights(
        embedding=embedding,
        layers=tuple(layer(number) for number in range(config.layers)),
        norm=checkpoint.norm("model.norm.weight"),
        head=embedding if checkpoint.tied else checkpoint.floats(HEAD),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every tensor that the model needs, by its Hugging Face name: those of the decoder, and those
    of its vision tower if it has one."""
    hidden, intermediate, queries, keys = config.hidden, config.intermediate, config.queries, config.keys
    layer: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in NORM_NAMES[config.norms].values()}
    if config.fused:
        layer |= {"self_attn.qkv_proj.weight": (queries + 2 * keys, hidden)}
        layer |= {"mlp.gate_up_proj.weight": (2 * intermediate, hidden)}
    else:
        layer |= {f"self_attn.{name}_proj.weight": (queries if name == "q" else keys, hidden) for name in "qkv"}
        layer |= {f"mlp.{name}_proj.weight": (intermediate, hidden) for name in ("gate", "up")}
    layer |= {"self_attn.o_proj.weight": (hidden, queries), "mlp.down_proj.weight": (hidden, intermediate)}
    if config.query_norm == "heads":
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    elif config.query_norm == "whole":
        layer |= {"self_attn.q_norm.weight": (queries,), "self_attn.k_norm.weight": (keys,)}
    if config.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (queries,), "self_attn.k_proj.bias": (keys,)}
        layer |= {"self_attn.v_proj.bias": (keys,)}
    if config.output_bias:
        layer |= {"self_attn.o_proj.bias": (hidden,)}
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tied:
        shapes[HEAD] = (config.vocab, hidden)
    for number in range(config.layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    if config.vision is not None:
        shapes |= vision_shapes(config.vision, hidden)
    return shapes


def text_name(stored: str) -> str:
    """Return the name that a tensor has in a model of text alone; models that take images put it below another. The
    tensors of these models' other parts have one name, too, though files differ."""
    for prefix, shown in _PREFIXES.items():
        if stored.startswith(prefix):
            return shown + stored.removeprefix(prefix)
    return stored


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the files of a directory's weights, the index first if there is one. Raise ModelError."""
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").exists() or not index.exists():
        return [directory / "model.safetensors"]
    return [index, *sorted({directory / file for file in _read_index(index).weight_map.values()})]


def _open(files: Sequence[Path]) -> tuple[dict[str, TensorFile], dict[str, str]]:
    """Return the mapped files by name, and the name of the file of each tensor."""
    first, *shards = files
    if not shards:
        single = TensorFile(first)
        return {first.name: single}, dict.fromkeys(single.entries, first.name)
    return {shard.name: TensorFile(shard) for shard in shards}, _read_index(first).weight_map


def _read_index(path: Path) -> _Index:
    index = read_model_json(path, _Index, limit_bytes=LIST_LIMIT_BYTES)
    for file in index.weight_map.values():
        if Path(file).name != file:  # a model from elsewhere must not name files outside its directory
            raise ModelError(f"{path}: {file!r} is not the name of a file in this directory")
    return index


def weights_digest(directory: Path, config: ModelConfig, file: Path | None = None) -> str:
    """Return the digest of a model's weights as 16 hex digits, so that cached blocks of other weights are never used
    for it; `file` has them if it is given. Raise ModelError.

    The digest covers the parts of config.json that are read, and each tensor's name, shape and type. It covers PIECES
    pieces of a tensor's bytes, the first and the last among them; tensors of up to 64 KiB, so all norms and biases of
    today's models, are covered completely. Fine-tuning, merging and quantising change every piece. A change that leaves
    all pieces of all tensors as they were is not found: after editing single rows of a matrix, give the model another
    name. How the weights are split into files does not matter. It takes 30 ms for 270 tensors; reading all bytes would
    take seconds.
    """
    digest = hashlib.sha256(_ARITHMETIC + _said(config))
    checkpoint = Checkpoint(directory, config, file)
    for name in sorted(checkpoint.shapes):
        entry = checkpoint.entry(name)
        digest.update(msgspec.json.encode((name, entry.dtype, entry.shape)))
        for piece in checkpoint.pieces(name, PIECES, PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()[:16]


def check_digest(directory: Path, config: ModelConfig, digest: str, file: Path | None = None) -> None:
    """Raise ModelError if a directory's weights do not have this digest any longer."""
    if weights_digest(directory, config, file) != digest:
        raise ModelError(f"{directory}: the weights have changed since the worker started; start it again")


def _said(config: ModelConfig) -> bytes:
    """Return the config without fields that have their defaults, so that a new field changes no digest, and without the
    tokens that end an answer, which change no block."""
    fields = msgspec.to_builtins(config)
    del fields["eos_token_ids"]
    for field in msgspec.structs.fields(config):
        if getattr(config, field.name) == field.default:
            del fields[field.name]
    return msgspec.json.encode(fields)
