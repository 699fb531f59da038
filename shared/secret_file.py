"""Reads a secret from a file that a setting names. No error shows what is in it."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigError
from shared.regular_file import read_regular_file

SECRET_LIMIT_BYTES = 64 << 10
"""The maximum size of such a file. Credentials of NATS with a long JWT have some 2 KB."""


def read_secret(path: str, setting: str) -> str:
    """Return the text of the file, without white space around it. Raise ConfigError, which names the setting."""
    try:
        text = read_regular_file(Path(path), SECRET_LIMIT_BYTES).decode().strip()
    except OSError as wrong:
        raise ConfigError(f"{setting} {path}: {wrong.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting} {path}: not UTF-8") from None
    if not text:
        raise ConfigError(f"{setting} {path}: empty")
    return text
