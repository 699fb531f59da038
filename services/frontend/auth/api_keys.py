"""API keys: what they look like, and the file that names them. Pure.

    alice = { sha256 = "9f86d0…", requests_per_minute = 600, tokens_per_minute = 200_000, concurrency = 16 }

in TOML, or the same in JSON. The file holds no key, only what SHA-256 makes of one. A fast hash is right here: a key
is 256 random bits, which nobody finds by trying, at whatever speed. Slow hashes are for what people can remember, and
would cost every request some milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shared.errors import ConfigError

FILE_LIMIT_BYTES = 1 << 20
KEYS_LIMIT = 1000
"""Each has a few series in the metrics."""
KEY_LIMIT_CHARACTERS = 256
"""Ours have 46; nothing longer is hashed."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""Lower case, so that a key, put where its name should be, is not taken for one, and shown."""
_LONG = re.compile(r"[0-9A-Za-z_-]{33,}")
"""What parsers repeat of a file and could be a key, put where a field's name should be; no field's is as long."""
_MOST = 10**12

Limit = Annotated[int, Meta(ge=1, le=_MOST)]


class KeyEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says of one key; None: no such limit."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Prompt and output together."""
    concurrency: Limit | None = None
    """Requests at once."""


def key_digest(key: str) -> bytes:
    """What the file holds of a key, in bytes."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def read_keys(file: bytes) -> dict[str, KeyEntry]:
    """Name → entry. Raises ConfigError, which tells what is wrong where, and nothing of what stands there."""
    if len(file) > FILE_LIMIT_BYTES:
        raise ConfigError(f"more than {FILE_LIMIT_BYTES} bytes")
    named = _parse(file)
    if len(named) > KEYS_LIMIT:
        raise ConfigError(f"{len(named)} keys are more than {KEYS_LIMIT}")
    entries: dict[str, KeyEntry] = {}
    owners: dict[str, str] = {}
    for at, (name, given) in enumerate(named.items(), 1):
        if not _NAME.fullmatch(name):
            raise ConfigError(f"entry {at}: a name is 1 to 64 of a-z, 0-9, - and _, and begins with a letter or digit")
        try:
            entry = msgspec.convert(given, KeyEntry)
        except msgspec.ValidationError as wrong:
            raise ConfigError(f"{name}: {_LONG.sub('…', str(wrong))}") from None
        if (other := owners.setdefault(entry.sha256, name)) != name:
            raise ConfigError(f"{name}: has the same key as {other}")
        entries[name] = entry
    return entries


def _parse(file: bytes) -> Mapping[str, Any]:
    try:
        text = file.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8") from None
    try:
        # No TOML file begins with a brace.
        named = json.loads(text, object_pairs_hook=_once) if text.lstrip().startswith("{") else tomllib.loads(text)
    except json.JSONDecodeError as wrong:
        raise ConfigError(f"not JSON: line {wrong.lineno}, column {wrong.colno}: {wrong.msg}") from None
    except tomllib.TOMLDecodeError as wrong:
        raise ConfigError(f"not TOML: {_LONG.sub('…', str(wrong))}") from None
    except ValueError:  # Python's own, of both
        raise ConfigError("a number with too many digits") from None
    except RecursionError:
        raise ConfigError("nested too deeply") from None
    assert isinstance(named, dict)
    return named


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As in TOML, nothing is said twice: which of two limits holds should not depend on their order."""
    if len(found := dict(pairs)) < len(pairs):
        raise ConfigError("not JSON: a name stands twice in one object")
    return found
