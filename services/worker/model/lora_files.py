"""The files of a LoRA, as PEFT writes them: what can be said without reading them whole, and their digest."""

from __future__ import annotations

import hashlib
import os
import threading
from math import prod
from pathlib import Path

from services.worker.model.tensor_header import read_header
from shared.errors import ModelError
from shared.model_file import CONFIG_LIMIT_BYTES

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, TENSORS)
LIMIT_BYTES = 8 << 30
"""Most bytes of one file."""
_CHUNK_BYTES = 1 << 20


def check_files(directory: Path, most_bytes: int = 0) -> None:
    """Check what shows without reading the weights: that both files are there, their sizes, and the header of the
    tensors. Raise ModelError, also if the tensors take more than `most_bytes` as float32, unless that is 0."""
    try:
        if not directory.is_dir():
            raise ModelError(f"path: {directory} is not a directory that this worker sees")
        for name, limit_bytes in ((CONFIG, CONFIG_LIMIT_BYTES), (TENSORS, LIMIT_BYTES)):
            _check_size(directory / name, limit_bytes)
    except OSError as wrong:
        raise ModelError(f"path: {wrong.filename or directory}: {wrong.strerror}") from wrong
    try:
        _, entries = read_header(directory / TENSORS)
    except ModelError as wrong:
        raise ModelError(f"path: {wrong}") from None
    size_bytes = sum(prod(entry.shape) * 4 for entry in entries.values())
    if most_bytes and size_bytes > most_bytes:
        raise ModelError(
            f"path: {directory / TENSORS}: {size_bytes} bytes as float32; lora_bytes allows {most_bytes}: raise it"
        )


def digest_lora(directory: Path, given_up: threading.Event | None = None) -> str:
    """Return the SHA-256, in hexadecimal digits, of the names, sizes and contents of the two files. It reads them, so
    it takes about a second for each GB. Raise ModelError if one is not there, cannot be read, is too large or is
    being written, or if `given_up` is set meanwhile."""
    digest = hashlib.sha256(b"headrace lora")
    try:
        if not directory.is_dir():
            raise ModelError(f"path: {directory} is not a directory that this worker sees")
        for name in FILES:
            _read_into(digest, directory / name, given_up or threading.Event())
    except OSError as wrong:
        raise ModelError(f"path: {wrong.filename or directory}: {wrong.strerror}") from wrong
    return digest.hexdigest()


def _check_size(file: Path, limit_bytes: int) -> None:
    """Raise ModelError if a file is missing or too large, and OSError."""
    if not file.is_file():
        pickled = file.suffix == ".safetensors" and (file.parent / "adapter_model.bin").exists()
        remedy = "; adapter_model.bin is a pickle, save it as safetensors" if pickled else ""
        raise ModelError(f"path: {file} is not there{remedy}")
    size_bytes = file.stat().st_size
    if size_bytes > limit_bytes:
        raise ModelError(f"path: {file} has {size_bytes} bytes; at most {limit_bytes} are read")


def _read_into(digest: hashlib._Hash, file: Path, given_up: threading.Event) -> None:
    """Add a file to the digest. Raise ModelError and OSError."""
    _check_size(file, LIMIT_BYTES)
    with file.open("rb") as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
        digest.update(f"{file.name} {size_bytes} ".encode())
        left_bytes = size_bytes
        while chunk := opened.read(min(_CHUNK_BYTES, left_bytes + 1)):
            left_bytes -= len(chunk)
            if left_bytes < 0:
                break
            if given_up.is_set():
                raise ModelError(f"path: {file} is no longer wanted")
            digest.update(chunk)
    if left_bytes:
        raise ModelError(f"path: {file} is being written; try again when it is complete")
