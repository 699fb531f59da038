"""Reads the header of a safetensors file, without NumPy.

    8 bytes      | header_bytes of JSON, padded with spaces   | tensors, back to back
    header_bytes   name → dtype, shape, data_offsets            offsets count from here

Format: https://huggingface.co/docs/safetensors. Everything in a header is checked before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import ModelError
from shared.model_file import open_model_file

HEADER_LIMIT_BYTES = 16 << 20
"""The largest header that is read. The format allows 100 MB, which take 12 s and 1 GiB to read; a thousand layers of a
supported model have 2 MB."""
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""The size of an element of each supported type. A file may hold tensors of other types if they are never read."""

Shape = tuple[int, ...]


class TensorEntry(Struct, frozen=True):
    """One tensor's entry in the header."""

    dtype: str
    shape: Shape
    data_offsets: tuple[int, int]


def read_header(path: Path) -> tuple[int, dict[str, TensorEntry]]:
    """Return the byte at which the tensors begin, and each tensor's entry by name. Raise ModelError if the file is
    missing, torn or not of this format."""
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
    start = 8 + header_bytes
    return start, _parse(path, header, size_bytes - start)


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
        item_bytes = ITEM_BYTES.get(entries[name].dtype)
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
