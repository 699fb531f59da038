"""Writes a model of Llama 8B's shape with random bfloat16 weights as a Hugging Face directory, fast: 15 GB in seconds.

    python -m benchmarks.gpu.model DIRECTORY [--tokenizer DIRECTORY]

The tokenizer is SmolLM2's, whose vocabulary of 49,152 the model then has instead of Llama's 128,256: 0.6 GB less for a
step to read. Each tensor is a run through one random tile whose length is a prime, so that no two rows of a matrix are
alike; norms are one. What such a model says is noise, and it costs what a real one costs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.report import ROOT
from deploy.local.stack.model import fetch_default
from services.worker.native.config import ModelConfig
from services.worker.native.prepare import prepare
from services.worker.native.rope import PlainRope
from services.worker.native.weights import tensor_shapes

LLAMA_8B = ModelConfig(
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    context_length=131072,
    norm_epsilon=1e-5,
    rope=PlainRope(rope_theta=500_000.0),
    tied=False,
    qkv_bias=False,
    output_bias=False,
    eos_token_ids=(),
)
MODELS = ROOT / ".headrace" / "models"
SMOL_VOCABULARY = 49_152
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_TILE = 33_554_393
"""The length of the tile, a prime."""


def main() -> int:
    """Write the model and print its directory."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    add_tokenizer(parser)
    flags = parser.parse_args()
    print(write_model(flags.directory, LLAMA_8B, flags.tokenizer or smol_tokenizer()))
    return 0


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", type=Path, help="a directory with SmolLM2's; default: out of the default model")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a benchmark that serves the model; `model_in` reads them."""
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for pools and the model")
    parser.add_argument("--model", type=Path, help="a directory of benchmarks.gpu.model; default: a new one")
    add_tokenizer(parser)


@contextmanager
def model_in(flags: argparse.Namespace) -> Iterator[Path]:
    """Yield the model's directory; one that no flag named is removed at the end."""
    if flags.model is not None:
        yield flags.model
        return
    with tempfile.TemporaryDirectory(prefix="llama-8b-", dir=flags.memory) as directory:
        yield write_model(Path(directory), LLAMA_8B, flags.tokenizer or smol_tokenizer())


def smol_tokenizer() -> Path:
    """Return the directory of the model that `up` serves; it is fetched if it is missing."""
    return prepare(fetch_default(MODELS, lambda _what, _share: None), MODELS, lambda _loading: None)


def write_model(directory: Path, shape: ModelConfig, tokenizer: Path) -> Path:
    """Write a model of `shape`, with SmolLM2's vocabulary, into `directory` and return that."""
    shape = msgspec.structs.replace(shape, vocab=SMOL_VOCABULARY)
    assert shape.rope == LLAMA_8B.rope, "config.json says this one"
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, directory / name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_weights(directory / "model.safetensors", shape)
    return directory


def random_tile(scale: float) -> NDArray[np.uint16]:
    """Return normally distributed bfloat16 numbers."""
    return _bfloat16(np.random.default_rng(0).standard_normal(_TILE, np.float32) * np.float32(scale))


def _write_weights(path: Path, shape: ModelConfig) -> None:
    """Write bfloat16 weights in the format of safetensors."""
    shapes = tensor_shapes(shape)
    ends = accumulate((2 * prod(dimensions) for dimensions in shapes.values()), initial=0)
    header = {
        name: {"dtype": "BF16", "shape": dimensions, "data_offsets": offsets}
        for (name, dimensions), offsets in zip(shapes.items(), pairwise(ends), strict=True)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-(8 + len(text)) % 64)
    # Products of `hidden` such numbers with numbers near one are near one.
    tile, at = random_tile(shape.hidden**-0.5), 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dimensions in shapes.values():
            if len(dimensions) == 1:
                file.write(_bfloat16(np.ones(dimensions, np.float32)).data)
            else:
                at = _run_through(tile, at, prod(dimensions), file)


def _run_through(tile: NDArray[np.uint16], at: int, count: int, file: IO[bytes]) -> int:
    """Write `count` numbers of the tile, repeated without end, from `at` on; return where they end."""
    while count:
        piece = tile[at : at + count]
        file.write(piece.data)
        count -= len(piece)
        at = (at + len(piece)) % len(tile)
    return at


def _bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper halves: rounding towards zero is good enough for noise."""
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


if __name__ == "__main__":
    sys.exit(main())
