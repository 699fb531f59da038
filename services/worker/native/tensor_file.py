"""Reads one safetensors file, its tensors as views of the mapped file, and writes one tensor by tensor.

The format is in `tensor_header.py`. In our files the tensors begin at a multiple of 64 bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.worker.model.tensor_header import ITEM_BYTES, Shape, TensorEntry, read_header
from shared.errors import ModelError

_ALIGNMENT_BYTES = 64
PIECE_ELEMENTS = 1 << 22
"""The number of elements of the largest piece that `float_pieces` yields."""
Floats = NDArray[np.float32]


@contextmanager
def no_memory_as_model_error(path: Path, what: str) -> Iterator[None]:
    """Raise ModelError if this process has no memory for `what`, or cannot map it: what is read of `path`."""
    try:
        yield
    except MemoryError:
        raise ModelError(f"{path}: no memory is left for {what}") from None
    except OSError as wrong:
        raise ModelError(f"{path}: {wrong.strerror or wrong}") from None


class TensorFile:
    """A mapped safetensors file. Its arrays stay valid without it, and processes share them in the page cache."""

    def __init__(self, path: Path) -> None:
        """Map `path`. Raise ModelError if the file is missing, torn or not of this format."""
        self.path = path
        self._start, self.entries = read_header(path)
        self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, "r") if self.entries else np.empty(0, np.uint8)

    def pieces(self, name: str, most: int, piece_bytes: int) -> Iterator[memoryview]:
        """Yield up to `most` pieces of the tensor's stored bytes, evenly spread, the first and the last among them.

        A tensor that is no larger than these pieces is one piece.
        """
        first, end = self.entries[name].data_offsets
        stored = np.asarray(self._bytes)[self._start + first : self._start + end].data
        if stored.nbytes <= most * piece_bytes:
            yield stored
            return
        for number in range(most):
            start = (stored.nbytes - piece_bytes) * number // (most - 1)
            yield stored[start : start + piece_bytes]

    def floats(self, name: str) -> Floats:
        """Return the tensor as float32: a view of the mapped file if it is stored so, otherwise a converted copy."""
        entry = self.entries[name]
        return self._floats(name, *entry.data_offsets).reshape(entry.shape)

    def float_pieces(self, name: str) -> Iterator[Floats]:
        """Yield the elements of a tensor as float32 in order, in pieces of at most PIECE_ELEMENTS."""
        first, end = self.entries[name].data_offsets
        step = PIECE_ELEMENTS * ITEM_BYTES.get(self.entries[name].dtype, 1)
        for start in range(first, end, step):
            yield self._floats(name, start, min(start + step, end))

    def _floats(self, name: str, first: int, end: int) -> Floats:
        """Return the elements between two offsets, in one dimension."""
        stored = np.asarray(self._bytes)[self._start + first : self._start + end]
        match self.entries[name].dtype:
            case "F32":
                if (self._start + first) % 4:
                    stored = stored.copy()  # a header whose length is no multiple of 4 is legal but rare
                return stored.view("<f4")
            case "F16":
                return np.frombuffer(stored.tobytes(), "<f2").astype(np.float32)
            case "BF16":  # the upper half of a float32
                return (np.frombuffer(stored.tobytes(), "<u2").astype(np.uint32) << 16).view(np.float32)
            case other:
                raise ModelError(f"{self.path}: {name} is stored as {other}; expected float32, float16 or bfloat16")


class TensorLayout:
    """What lies where in a file of float32 tensors. Equal shapes give equal layouts.

    Tensors whose size keeps the next one on a multiple of 64 bytes come first, because BLAS is faster on cache lines.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.names = sorted(shapes, key=lambda name: (prod(shapes[name]) * 4 % _ALIGNMENT_BYTES != 0, name))
        self.entries: dict[str, TensorEntry] = {}
        end = 0
        for name in self.names:
            start, end = end, end + prod(shapes[name]) * 4
            self.entries[name] = TensorEntry("F32", tuple(shapes[name]), (start, end))
        text = msgspec.json.encode({"__metadata__": {"format": "pt"}, **self.entries})
        text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
        self.head = len(text).to_bytes(8, "little") + text
        """The bytes before the tensors."""
        self.tensor_bytes = end

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return len(self.head) + self.tensor_bytes

    @property
    def digest(self) -> str:
        """The digest of the layout, as 16 hex digits."""
        return hashlib.sha256(self.head).hexdigest()[:16]


def write_tensors(
    path: Path, shapes: Mapping[str, Shape], produce: Callable[[str], Floats], wrote: Callable[[float], None]
) -> None:
    """Write float32 tensors one by one, so that only one is in memory, and flush them to the disk.

    `produce` is called once for each name of `shapes`, and `wrote` with the share of the bytes written so far.
    """
    layout = TensorLayout(shapes)
    with path.open("wb") as file:
        file.write(layout.head)
        for name in layout.names:
            tensor = produce(name)
            assert tensor.shape == tuple(shapes[name]), name
            file.write(np.ascontiguousarray(tensor, "<f4").data)
            wrote(layout.entries[name].data_offsets[1] / max(layout.tensor_bytes, 1))
        file.flush()
        os.fsync(file.fileno())
