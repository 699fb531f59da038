"""The files of a LoRA, as PEFT writes them, and their digest."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from shared.errors import ModelError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, TENSORS)
LIMIT_BYTES = 8 << 30
"""Most bytes of one file."""
_CHUNK_BYTES = 1 << 20


def digest_lora(directory: Path) -> str:
    """Return the SHA-256, in hexadecimal digits, of the names, sizes and contents of the two files. It reads them, so
    it takes about a second for each GB. Raise ModelError where one is not there, cannot be read, is too large or is
    being written."""
    digest = hashlib.sha256(b"headrace lora")
    try:
        if not directory.is_dir():
            raise ModelError(f"path: {directory} is not a directory that this worker sees")
        for name in FILES:
            _read_into(digest, directory / name)
    except OSError as wrong:
        raise ModelError(f"path: {wrong.filename or directory}: {wrong.strerror}") from wrong
    return digest.hexdigest()


def _read_into(digest: hashlib._Hash, file: Path) -> None:
    """Add a file to the digest. Raise ModelError and OSError."""
    if not file.is_file():
        pickled = file.suffix == ".safetensors" and (file.parent / "adapter_model.bin").exists()
        remedy = "; adapter_model.bin is a pickle, save it as safetensors" if pickled else ""
        raise ModelError(f"path: {file} is not there{remedy}")
    with file.open("rb") as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
        if size_bytes > LIMIT_BYTES:
            raise ModelError(f"path: {file} has {size_bytes >> 20} MiB; at most {LIMIT_BYTES >> 20} are read")
        digest.update(f"{file.name} {size_bytes} ".encode())
        left_bytes = size_bytes
        while chunk := opened.read(min(_CHUNK_BYTES, left_bytes + 1)):
            left_bytes -= len(chunk)
            if left_bytes < 0:
                break
            digest.update(chunk)
    if left_bytes:
        raise ModelError(f"path: {file} is being written; try again when it is complete")
