"""`headrace key new NAME`: makes an API key and its line for the file in `access.keys_file` (docs/access.md)."""

from __future__ import annotations

import hashlib
import re
import secrets

from shared.errors import ConfigError

PREFIX = "hr-"
"""Prefix by which people and secret scanners recognize a key."""
KEY_BYTES = 32
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""Names that the frontend accepts."""


def new(name: str, limits: dict[str, int | None]) -> None:
    """Make a key; print it and its line. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name}: a name is 1 to 64 of a-z, 0-9, - and _, and begins with a letter or digit")
    for limit, value in limits.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{limit.replace('_', '-')} is at least 1")
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    print(f"The key of {name}, shown only this once:\n\n    {key}\n")
    print(f"Add this line to the frontends' access.keys_file:\n\n{line(name, key, limits)}")


def line(name: str, key: str, limits: dict[str, int | None]) -> str:
    """Return the line of the keys file, with the hash of the key and its limits."""
    said = [f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    said += [f"{limit} = {value}" for limit, value in limits.items() if value is not None]
    return f"{name} = {{ {', '.join(said)} }}"
