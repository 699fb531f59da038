"""Reads the keys file: the digest and the limits of each API key. Pure. Frontends read it, `headrace key` changes it.

    alice = { sha256 = "9f86d0…", requests_per_minute = 600, tokens_per_minute = 200_000, concurrency = 16 }

in TOML, or the same in JSON. The file holds no key, only its SHA-256 digest. A fast hash is right here: a key is 256
random bits, which cannot be guessed at any speed. Slow hashes protect passwords that people remember, and would cost
every request some milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shared.errors import ConfigError

FILE_LIMIT_BYTES = 1 << 20
"""Bytes that a keys file may have."""
KEYS_LIMIT = 1000
"""Keys in a file at most, since each has a few series in the metrics."""
KEY_LIMIT_CHARACTERS = 256
"""Characters of a key at most; keys made here have 46. A longer one is refused without hashing it."""

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""A key's name. It is lower case, so that a key written in place of its name is refused and not shown."""
NAME_RULE = "a name has 1 to 64 of the characters a-z, 0-9, - and _, and begins with a letter or digit"
"""What a message says of a name that is refused."""
_LONG = re.compile(r"[0-9A-Za-z_-]{33,}")
"""What could be a key in a parser's error message, written in place of a field's name; no field's name is as long."""
_PATTERN = re.compile(r"^Expected `str` matching regex '.*'(?= - at `\$\.(?P<field>sha256|salt)`$)")
_EXPECTED = {
    "sha256": "64 digits of 0-9 and a-f",
    "salt": "`own`, or 1 to 64 of the characters a-z, 0-9, - and _, beginning with a letter or digit",
}
"""A field of an entry → its form in words, for a message."""
_MOST = 10**12

_INT32_MAX = (1 << 31) - 1

Limit = Annotated[int, Meta(ge=1, le=_MOST)]


class KeyEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of one key; a limit of None is not applied."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Tokens of prompts and answers together."""
    concurrency: Limit | None = None
    """Requests that may run at one time."""
    min_priority: Annotated[int, Meta(ge=-_INT32_MAX, le=_INT32_MAX)] | None = None
    """The lowest `priority` that its requests may ask for; lower is served earlier. None means
    `access.min_priority`."""
    salt: Annotated[str, Meta(pattern=f"^{NAME.pattern}$")] | None = None
    """The keys that share cached blocks with this one: no other (`own`), or those of the same salt. None means all keys
    without a salt."""


def key_digest(key: str) -> bytes:
    """Return the SHA-256 digest of a key, which the file holds in hexadecimal."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def read_keys(file: bytes) -> dict[str, KeyEntry]:
    """Parse a keys file; return name → entry. Raise ConfigError, which says what is wrong where, quoting no value."""
    named = parse_keys(file)
    if len(named) > KEYS_LIMIT:
        raise ConfigError(f"the file has {len(named)} keys; at most {KEYS_LIMIT} are allowed")
    entries: dict[str, KeyEntry] = {}
    owners: dict[str, str] = {}
    for at, (name, given) in enumerate(named.items(), 1):
        if not NAME.fullmatch(name):
            raise ConfigError(f"entry {at}: {NAME_RULE}")
        try:
            entry = msgspec.convert(given, KeyEntry)
        except msgspec.ValidationError as wrong:
            said = _PATTERN.sub(lambda found: f"Expected {_EXPECTED[found['field']]}", str(wrong))
            raise ConfigError(f"{name}: {_LONG.sub('…', said)}") from None
        if (other := owners.setdefault(entry.sha256, name)) != name:
            raise ConfigError(f"{name}: this is the same key as that of {other}")
        entries[name] = entry
    return entries


def parse_keys(file: bytes) -> dict[str, Any]:
    """Return name → what the file has of it, unchecked. Raise ConfigError, which quotes no value."""
    if len(file) > FILE_LIMIT_BYTES:
        raise ConfigError(f"the file is larger than {FILE_LIMIT_BYTES} bytes")
    try:
        text = file.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError("the file is not UTF-8") from None
    try:
        # No TOML file begins with a brace.
        if text.lstrip().startswith("{"):
            named = json.loads(text, object_pairs_hook=_without_repeats)
        else:
            named = tomllib.loads(text)
    except json.JSONDecodeError as wrong:
        raise ConfigError(f"the file is not JSON: line {wrong.lineno}, column {wrong.colno}: {wrong.msg}") from None
    except tomllib.TOMLDecodeError as wrong:
        raise ConfigError(f"the file is not TOML: {_LONG.sub('…', str(wrong))}") from None
    except ValueError:  # raised by Python for both formats
        raise ConfigError("the file has a number with too many digits") from None
    except RecursionError:
        raise ConfigError("the file is nested too deeply") from None
    assert isinstance(named, dict)
    return named


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a repeated name, as TOML does: which of two limits holds must not depend on their order."""
    if len(found := dict(pairs)) < len(pairs):
        raise ConfigError("the file has a name twice in one JSON object")
    return found
