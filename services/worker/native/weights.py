"""Maps a directory's weights and checks their names and shapes against config.json.

Names and shapes are those of transformers' LlamaForCausalLM and Qwen2ForCausalLM. Matrices are (outputs, inputs),
row-major, as stored, so that a float32 file is used in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from services.worker.native.config import ModelConfig
from services.worker.native.linear import Array
from services.worker.native.tensor_file import Floats, Shape, TensorEntry, TensorFile
from shared.errors import ModelError
from shared.model_file import LIST_LIMIT_BYTES, read_model_json


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer; a bias is None if the model does not have it."""

    input_norm: Array
    q: Array
    k: Array
    v: Array
    o: Array
    q_bias: Array | None
    k_bias: Array | None
    v_bias: Array | None
    o_bias: Array | None
    output_norm: Array
    gate: Array
    up: Array
    down: Array


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a decoder's weights."""

    embedding: Array
    layers: tuple[Layer, ...]
    norm: Array
    head: Array
    """The output projection, (vocab, hidden); the embedding itself if they are tied."""


class _Index(Struct, frozen=True):
    weight_map: dict[str, str]


class Checkpoint:
    """The safetensors file of a directory, or several with their index, checked against the config."""

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        """Map and check the files. Raises ModelError that names the file, the tensor and what was expected."""
        self.shapes = tensor_shapes(config)
        self._files, self._where = _open(directory)
        for name, shape in self.shapes.items():
            file = self._where.get(name)
            if file is None:
                raise ModelError(
                    f"{directory}: tensor {name} is in no safetensors file; expected one with shape {shape}"
                )
            entry = self._files[file].entries.get(name)
            if entry is None:
                raise ModelError(f"{directory / file}: tensor {name} is missing; the index says it is here")
            if entry.shape != shape:
                raise ModelError(f"{directory / file}: tensor {name} has shape {entry.shape}; expected {shape}")
            if entry.dtype not in ("F32", "F16", "BF16"):
                raise ModelError(
                    f"{directory / file}: tensor {name} is {entry.dtype}; expected float32, float16 or bfloat16"
                )

    @property
    def mapped(self) -> bool:
        """Whether every tensor is float32 and so is used in place."""
        return all(self.entry(name).dtype == "F32" for name in self.shapes)

    def entry(self, name: str) -> TensorEntry:
        """Return how one tensor is stored."""
        return self._files[self._where[name]].entries[name]

    def pieces(self, name: str, most: int, piece_bytes: int) -> Iterator[memoryview]:
        """Yield pieces of one tensor's bytes, as `TensorFile.pieces` does."""
        return self._files[self._where[name]].pieces(name, most, piece_bytes)

    def floats(self, name: str) -> Floats:
        """Return one tensor as float32."""
        return self._files[self._where[name]].floats(name)


def load_weights(directory: Path, config: ModelConfig) -> Weights:
    """Map a directory's weights; those that are not float32 are converted. Raises ModelError."""
    checkpoint = Checkpoint(directory, config)

    def layer(number: int) -> Layer:
        stem = f"model.layers.{number}."

        def optional(name: str) -> Floats | None:
            return checkpoint.floats(stem + name) if stem + name in checkpoint.shapes else None

        return Layer(
            input_norm=checkpoint.floats(stem + "input_layernorm.weight"),
            q=checkpoint.floats(stem + "self_attn.q_proj.weight"),
            k=checkpoint.floats(stem + "self_attn.k_proj.weight"),
            v=checkpoint.floats(stem + "self_attn.v_proj.weight"),
            o=checkpoint.floats(stem + "self_attn.o_proj.weight"),
            q_bias=optional("self_attn.q_proj.bias"),
            k_bias=optional("self_attn.k_proj.bias"),
            v_bias=optional("self_attn.v_proj.bias"),
            o_bias=optional("self_attn.o_proj.bias"),
            output_norm=checkpoint.floats(stem + "post_attention_layernorm.weight"),
            gate=checkpoint.floats(stem + "mlp.gate_proj.weight"),
            up=checkpoint.floats(stem + "mlp.up_proj.weight"),
            down=checkpoint.floats(stem + "mlp.down_proj.weight"),
        )

    embedding = checkpoint.floats("model.embed_tokens.weight")
    return Weights(
        embedding=embedding,
        layers=tuple(layer(number) for number in range(config.layers)),
        norm=checkpoint.floats("model.norm.weight"),
        head=embedding if config.tied else checkpoint.floats("lm_head.weight"),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every tensor that the decoder needs, by its Hugging Face name."""
    hidden, intermediate, queries, keys = config.hidden, config.intermediate, config.queries, config.keys
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    if config.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (queries,), "self_attn.k_proj.bias": (keys,)}
        layer |= {"self_attn.v_proj.bias": (keys,)}
    if config.output_bias:
        layer |= {"self_attn.o_proj.bias": (hidden,)}
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, hidden)
    for number in range(config.layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the files of a directory's weights, the index first if there is one. Raises ModelError."""
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").exists() or not index.exists():
        return [directory / "model.safetensors"]
    return [index, *sorted({directory / file for file in _read_index(index).weight_map.values()})]


def _open(directory: Path) -> tuple[dict[str, TensorFile], dict[str, str]]:
    """Return the mapped files by name, and the name of the file of each tensor."""
    first, *shards = checkpoint_files(directory)
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
