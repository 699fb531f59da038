"""The files of a LoRA, as PEFT writes them, and their digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from shared.errors import ModelError

FILES = ("adapter_config.json", "adapter_model.safetensors")
LIMIT_BYTES = 8 << 30
"""Most bytes of one file."""
_CHUNK_BYTES = 1 << 20


def digest_lora(directory: Path) -> str:
    """Return the SHA-256, in hexadecimal digits, of the names, sizes and contents of the two files. It reads them, so
    it takes about a second for each GB. Raise ModelError where one is not there or too large."""
    digest = hashlib.sha256(b"headrace lora")
    if not directory.is_dir():
        raise ModelError(f"path: {directory} is not a directory that this worker sees")
    for name in FILES:
        file = directory / name
        if not file.is_file():
            pickled = name.endswith(".safetensors") and (directory / "adapter_model.bin").exists()
            remedy = "; adapter_model.bin is a pickle, save it as safetensors" if pickled else ""
            raise ModelError(f"path: {file} is not there{remedy}")
        try:
            with file.open("rb") as opened:
                size_bytes = file.stat().st_size
                if size_bytes > LIMIT_BYTES:
                    raise ModelError(f"path: {file} has {size_bytes >> 20} MiB; at most {LIMIT_BYTES >> 20} are read")
                digest.update(f"{name} {size_bytes} ".encode())
                while chunk := opened.read(_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as wrong:
            raise ModelError(f"path: {file}: {wrong.strerror}") from wrong
    return digest.hexdigest()
