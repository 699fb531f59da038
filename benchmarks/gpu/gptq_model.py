"""Writes a model of another one's shape whose matrices have 4 bits, as GPTQ stores them: random numbers, no network.

    python -m benchmarks.gpu.gptq_model DIRECTORY MODEL

MODEL is a directory of `benchmarks.gpu.model`, whose tokenizer and other files are taken. A matrix (outputs, inputs) is
`qweight` (inputs ÷ 8, outputs), `qzeros` (groups, outputs ÷ 8) and `scales` (groups, outputs), of groups of 128 inputs.
Embeddings, norms and the head stay in bfloat16. What such a model says is noise, and it costs what a real one costs.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.worker.native.config import read_config
from services.worker.native.weights import Checkpoint

GROUP = 128
"""Inputs that have one scale."""
PER_WORD = 8
"""Numbers of 4 bits in an int32."""
_SPREAD = 4.61
"""The deviation of whole numbers from -8 to 7, all equally likely."""
_ZEROS = 0x77777777
"""Zero points of 8, which are stored less one."""
_NAMES = {"int32": "I32", "uint16": "BF16", "float16": "F16"}


def main(words: list[str]) -> int:
    """Write the model and print its directory."""
    directory, model = map(Path, words)
    print(write_gptq_model(directory, model))
    return 0


def write_gptq_model(directory: Path, model: Path) -> Path:
    """Write the model into `directory` and return that."""
    directory.mkdir(parents=True, exist_ok=True)
    for other in model.iterdir():
        if other.is_file() and other.suffix != ".safetensors":
            shutil.copyfile(other, directory / other.name)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    quantised: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
    config["quantization_config"] = quantised | {"sym": True, "checkpoint_format": "gptq"}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    checkpoint = Checkpoint(model, read_config(model))
    shapes = dict(gptq_shapes({name: tuple(shape) for name, shape in checkpoint.shapes.items()}))
    sizes = (int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())
    header = {
        name: {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": offsets}
        for (name, (shape, dtype)), offsets in zip(shapes.items(), pairwise(accumulate(sizes, initial=0)), strict=True)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-(8 + len(text)) % 64)
    tile = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, 8_388_593, np.int32)  # a prime
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (shape, _) in shapes.items():
            file.write(_tensor(checkpoint, name, shape, tile).data)
    return directory


def gptq_shapes(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Yield the name of each tensor, its shape and its type, of a model whose tensors have `shapes`. *Pure.*"""
    for name, shape in shapes.items():
        if not name.endswith("_proj.weight"):
            yield name, (shape, "uint16")
            continue
        (outputs, inputs), stem = shape, name.removesuffix("weight")
        assert inputs % GROUP == 0, f"{name} has {inputs} inputs"
        yield f"{stem}qweight", ((inputs // PER_WORD, outputs), "int32")
        yield f"{stem}qzeros", ((inputs // GROUP, outputs // PER_WORD), "int32")
        yield f"{stem}scales", ((inputs // GROUP, outputs), "float16")
        yield f"{stem}g_idx", ((inputs,), "int32")


def _tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], tile: NDArray[np.int32]) -> NDArray[Any]:
    """Return the numbers of one tensor, contiguous."""
    match name.rpartition(".")[2]:
        case "qweight":
            return np.resize(tile, shape)
        case "qzeros":
            return np.full(shape, _ZEROS, np.int32)
        case "scales":
            return np.full(shape, (shape[0] * GROUP) ** -0.5 / _SPREAD, np.float16)
        case "g_idx":
            return np.arange(shape[0], dtype=np.int32) // GROUP
        case _:
            (stored,) = checkpoint.pieces(name, 1, sys.maxsize)
            assert stored.nbytes == 2 * np.prod(shape), f"{name} is not in bfloat16"
            return np.frombuffer(stored, np.uint16)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
