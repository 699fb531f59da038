"""Reads the files of a model's directory. They come from elsewhere: each may be a pipe or a device, endless, or nested.

A file is opened without waiting, must be a regular one, and is read up to a limit. Whatever is wrong is a ModelError
that names the file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from shared.errors import ModelError

CONFIG_LIMIT_BYTES = 1 << 20
"""Of a file of settings; the largest of known models has some 10 KB."""
LIST_LIMIT_BYTES = 16 << 20
"""Of a file that names each tensor or each added token; the largest of known models have 1 to 10 MB."""
TOKENIZER_LIMIT_BYTES = 256 << 20
"""Of tokenizer.json; the largest of known models has 35 MB."""

T = TypeVar("T")


def open_model_file(path: Path) -> BinaryIO:
    """The file for reading, at its start. Raises ModelError where it is missing or not a regular file."""
    file = _opened(path)
    if file is None:
        raise ModelError(f"{path}: {os.strerror(errno.ENOENT)}")
    return file


def _opened(path: Path) -> BinaryIO | None:
    """None: there is no such file. Raises ModelError."""
    try:
        # A pipe that nothing writes to would hold a plain open() up for ever.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except IsADirectoryError:
        raise ModelError(f"{path}: not a regular file") from None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as wrong:
        raise ModelError(f"{path}: {wrong.strerror}") from None
    except ValueError as wrong:  # the path comes from a card and may hold anything
        raise ModelError(f"{str(path)!r}: {wrong}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ModelError(f"{path}: not a regular file")
    return file


def read_model_file(path: Path, limit_bytes: int, *, missing: bytes | None = None) -> bytes:
    """The whole file; `missing` where there is none. Raises ModelError, also where it is over the limit."""
    opened = _opened(path)
    if opened is None and missing is not None:
        return missing
    with opened or open_model_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        try:
            content = b"" if size_bytes > limit_bytes else file.read(limit_bytes + 1)
        except OSError as wrong:
            raise ModelError(f"{path}: {wrong.strerror}") from None
    if max(size_bytes, len(content)) > limit_bytes:
        raise ModelError(f"{path}: {max(size_bytes, len(content))} bytes; at most {limit_bytes} are read")
    return content


def decode_model_json(path: Path, content: bytes, kind: type[T]) -> T:
    """The file's JSON as `kind`. Raises ModelError where it is malformed or nested too deeply."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        raise ModelError(f"{path}: {wrong}") from None
    except RecursionError:
        raise ModelError(f"{path}: nested too deeply") from None


def read_model_json(
    path: Path, kind: type[T], *, limit_bytes: int = CONFIG_LIMIT_BYTES, missing: bytes | None = None
) -> T:
    """As the two above together."""
    return decode_model_json(path, read_model_file(path, limit_bytes, missing=missing), kind)
