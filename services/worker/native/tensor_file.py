"""Reads one safetensors file, its tensors as views of the mapped file, and writes one tensor by tensor.

    8 bytes      | header_bytes of JSON, padded with spaces   | tensors, back to back
    header_bytes   name → dtype, shape, data_offsets            offsets count from here, a multiple of 64 in our files

Format: https://huggingface.co/docs/safetensors. Everything in a header is checked before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shared.errors import ModelError
from shared.model_file import open_model_file

HEADER_LIMIT_BYTES = 16 << 20
"""The largest header that is read. The format allows 100 MB, which take 12 s and 1 GiB to read; a thousand layers of a
supported model have 2 MB."""
_ALIGNMENT_BYTES = 64
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""The size of an element of each supported type. A file may hold tensors of other types if they are never read."""

Shape = tuple[int, ...]
Floats = NDArray[np.float32]


class TensorEntry(Struct, frozen=True):
    """One tensor's entry in the header."""

    dtype: str
    shape: Shape
    data_offsets: tuple[int, int]


class TensorFile:
    """A mapped safetensors file. Its arrays stay valid without it, and processes share them in the page cache."""

    def __init__(self, path: Path) -> None:
        """Map `path`. Raise ModelError if the file is missing, torn or not of this format."""
        self.path = path
        with open_model_file(path) as file:
            try:
                size_bytes = os.fstat(file.fileno()).st_size
                prefix = file.read(8)
                header_bytes = int.from_bytes(prefix, "little")
                if len(prefix) < 8 or not 2 <= header_bytes <= size_bytes - 8:
                    raise ModelError(f"{path}: torn or not a safetensors file ({size_bytes} bytes)")
                if header_bytes > HEADER_LIMIT_BYTES:
                    raise ModelError(
                        f"{path}: the header has {header_bytes} bytes; at most {HEADER_LIMIT_BYTES} are supported"
                    )
                header = file.read(header_bytes)
            except OSError as wrong:
                raise ModelError(f"{path}: {wrong.strerror}") from None
        self._start = 8 + header_bytes
        self.entries = _parse(path, header, size_bytes - self._start)
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
        first, end = (self._start + offset for offset in entry.data_offsets)
        stored = np.asarray(self._bytes)[first:end]
        if entry.dtype == "F32":
            if first % 4:
                stored = stored.copy()  # a header whose length is no multiple of 4 is legal but rare
            return stored.view("<f4").reshape(entry.shape)
        if entry.dtype == "F16":
            return np.frombuffer(stored.tobytes(), "<f2").astype(np.float32).reshape(entry.shape)
        if entry.dtype == "BF16":  # the upper half of a float32
            bits = np.frombuffer(stored.tobytes(), "<u2").astype(np.uint32) << 16
            return bits.view(np.float32).reshape(entry.shape)
        raise ModelError(f"{self.path}: {name} is stored as {entry.dtype}; expected float32, float16 or bfloat16")


def write_tensors(
    path: Path, shapes: Mapping[str, Shape], produce: Callable[[str], Floats], wrote: Callable[[float], None]
) -> None:
    """Write float32 tensors one by one, so that only one is in memory, and flush them to the disk.

    `produce` is called once for each name of `shapes`, and `wrote` with the share of the bytes written so far.
    Tensors whose size keeps the next one on a multiple of 64 bytes come first, because BLAS is faster on cache lines.
    """
    names = sorted(shapes, key=lambda name: (prod(shapes[name]) * 4 % _ALIGNMENT_BYTES != 0, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + prod(shapes[name]) * 4
        header[name] = TensorEntry("F32", tuple(shapes[name]), (start, end))
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = produce(name)
            assert tensor.shape == tuple(shapes[name]), name
            file.write(np.ascontiguousarray(tensor, "<f4").data)
            wrote(header[name].data_offsets[1] / max(end, 1))
        file.flush()
        os.fsync(file.fileno())


def _parse(path: Path, header: bytes, data_bytes: int) -> dict[str, TensorEntry]:
    """Return the header's entries, which must fill the rest of the file without a hole or an overlap."""
    try:
        entries = {
            name: msgspec.convert(entry, TensorEntry)
            for name, entry in msgspec.json.decode(header, type=dict[str, Any]).items()
            if name != "__metadata__"
        }
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise ModelError(f"{path}: the header is not that of a safetensors file: {wrong}") from None
    end = 0
    for name, start, stop in _in_file_order(entries.items()):
        item_bytes = _ITEM_BYTES.get(entries[name].dtype)
        stated = stop - start if item_bytes is None else prod(entries[name].shape) * item_bytes
        if start != end or stop - start != stated or stop < start or min(entries[name].shape, default=0) < 0:
            raise ModelError(
                f"{path}: the header is inconsistent at {name}: bytes {start} to {stop}, expected from {end}"
            )
        end = stop
    if end != data_bytes:
        raise ModelError(f"{path}: torn: the header lists {end} bytes of tensors, the file has {data_bytes}")
    return entries


def _in_file_order(entries: Iterable[tuple[str, TensorEntry]]) -> Iterator[tuple[str, int, int]]:
    for name, entry in sorted(entries, key=lambda item: item[1].data_offsets):
        yield name, *entry.data_offsets
