"""Reads the files of a model's directory, which may be anything, with limits.

A file is opened without waiting, must be a regular file, and is read up to a limit. Every fault is a ModelError that
names the file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, TypeVar

import msgspec

from shared.errors import ModelError
from shared.regular_file import open_regular_file

CONFIG_LIMIT_BYTES = 1 << 20
"""The maximum size of a file of settings; known models have up to 10 KB."""
LIST_LIMIT_BYTES = 16 << 20
"""The maximum size of a file that lists each tensor or each added token; known models have up to 10 MB."""
TOKENIZER_LIMIT_BYTES = 256 << 20
"""The maximum size of tokenizer.json; known models have up to 35 MB."""

T = TypeVar("T")


def open_model_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raise ModelError if it is missing or not a regular file."""
    file = _opened(path)
    if file is None:
        raise ModelError(f"{path}: {os.strerror(errno.ENOENT)}")
    return file


def _opened(path: Path) -> BinaryIO | None:
    """Open a file. Return None if there is none. Raise ModelError."""
    try:
        return open_regular_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as wrong:  # the path comes from a model card and may contain anything
        named = str(path) if str(path).isprintable() else repr(str(path))
        raise ModelError(f"{named}: {wrong.strerror}") from None


def read_model_file(path: Path, limit_bytes: int, *, missing: bytes | None = None) -> bytes:
    """Return the whole file, or `missing` if there is none. Raise ModelError, also if the file is over the limit."""
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
    """Decode the file's JSON as `kind`. Raise ModelError if it is malformed or nested too deeply."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not JSON: not UTF-8") from None
    except msgspec.ValidationError as wrong:
        raise ModelError(f"{path}: {wrong}") from None
    except msgspec.MsgspecError as wrong:
        raise ModelError(f"{path}: not JSON: {str(wrong).removeprefix('JSON is malformed: ')}") from None
    except RecursionError:
        raise ModelError(f"{path}: nested too deeply") from None


def read_model_json(
    path: Path, kind: type[T], *, limit_bytes: int = CONFIG_LIMIT_BYTES, missing: bytes | None = None
) -> T:
    """Read and decode a JSON file, as the two functions above do."""
    return decode_model_json(path, read_model_file(path, limit_bytes, missing=missing), kind)


# --- the names of these files

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"

FILES: Mapping[str, int] = MappingProxyType(
    {
        CONFIG: CONFIG_LIMIT_BYTES,
        GENERATION: CONFIG_LIMIT_BYTES,
        TOKENIZER: TOKENIZER_LIMIT_BYTES,
        TOKENIZER_CONFIG: LIST_LIMIT_BYTES,
        SPECIAL_TOKENS: LIST_LIMIT_BYTES,
        TEMPLATE: CONFIG_LIMIT_BYTES,
        TOOL_TEMPLATE: CONFIG_LIMIT_BYTES,
        PROCESSOR_TEMPLATE: CONFIG_LIMIT_BYTES,
    }
)
"""The files → the largest size in bytes that is read of each."""
IMAGE_FILES: Mapping[str, int] = MappingProxyType({PREPROCESSOR: CONFIG_LIMIT_BYTES, PROCESSOR: CONFIG_LIMIT_BYTES})
"""Files that say how images are prepared → the largest size in bytes that is read of each. Workers need them;
frontends have what they say from the model card."""
