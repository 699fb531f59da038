"""The digest of a model's weights and of everything else that changes its KV, for the layout's name.

It covers the name of each file of weights, its size, the time of its last change and PIECES pieces of its bytes. So
copies of a model count as different ones, unless they keep the time (`cp -p`); `weights` in the connector's settings
names them alike.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

PIECES = 64
PIECE_BYTES = 4096
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_LEFT_OUT = ("_name_or_path", "transformers_version")
"""Fields of a config that say where it is from."""


def weights_digest(path: Path, config: Mapping[str, Any], settings: Mapping[str, str]) -> str:
    """Return 16 hex digits for the files at `path`, a directory or one file. `config` is the model's, `settings` what
    else changes the KV. Raise ConfigError if there are no files of weights, or one cannot be read."""
    digest = _digest_of("headrace vllm 1", config, settings)
    try:
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        for file in files:
            _read_pieces(digest, file)
    except OSError as wrong:
        raise ConfigError(f"{wrong.filename or path}: {wrong.strerror}") from None
    if not files:
        raise ConfigError(f"{path} has no files of weights ({', '.join(SUFFIXES)}); set the connector's `weights`")
    return digest.hexdigest()[:16]


def named_weights(name: str, config: Mapping[str, Any], settings: Mapping[str, str]) -> str:
    """Return the digest for weights that the user has named."""
    return _digest_of(["headrace vllm named 1", name], config, settings).hexdigest()[:16]


def _digest_of(kind: object, config: Mapping[str, Any], settings: Mapping[str, str]) -> hashlib._Hash:
    said = {name: value for name, value in config.items() if name not in _LEFT_OUT}
    return hashlib.sha256(json.dumps([kind, said, dict(settings)], sort_keys=True, default=str).encode())


def _read_pieces(digest: hashlib._Hash, file: Path) -> None:
    with file.open("rb") as opened:
        about = os.fstat(opened.fileno())
        size = about.st_size
        # A hub's file is a link to one that is named by its content; others are told apart by the time of change, too.
        digest.update(f"{file.name} {size} {file.resolve().name} {about.st_mtime_ns} ".encode())
        last = max(0, size - PIECE_BYTES)
        for at in sorted({last * piece // (PIECES - 1) for piece in range(PIECES)}):
            digest.update(os.pread(opened.fileno(), PIECE_BYTES, at))
