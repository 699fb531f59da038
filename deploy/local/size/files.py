"""Reads files that flags name: profiles, traces, measurements."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from deploy.local.size.profile_file import FILE_LIMIT_BYTES, Profile, decode_profile
from shared.errors import ConfigError
from shared.regular_file import read_regular_file


def check_parent(flag: str, file: str | Path) -> None:
    """Raise ConfigError if there is no directory for a file."""
    if not Path(file).absolute().parent.is_dir():
        raise ConfigError(f"{flag} {file}: no such directory: {Path(file).parent}")


def read_given(file: Path, limit_bytes: int, flag: str = "") -> bytes:
    """Return the content of a file that was given. Raise ConfigError, also if it has more than `limit_bytes`."""
    try:
        return read_regular_file(file, limit_bytes)
    except OSError as wrong:
        raise ConfigError(f"{flag} {file}: {wrong.strerror}".lstrip()) from None


def read_profile(file: Path, flag: str = "") -> Profile:
    """Return a profile of which all times between its corners are known. Raise ConfigError."""
    name = f"{flag} {file}".lstrip()
    profile = decode_profile(read_given(file, FILE_LIMIT_BYTES, flag), name)
    if len(profile.prefill) < 2 or len(profile.decode) < 2:
        raise ConfigError(f"{name}: too few points: let `profile` go on with it")
    for kind, rows in (("prefill", profile.prefill), ("decode", profile.decode)):
        xs, ys = ({row[axis] for row in rows} for axis in (0, 1))
        if {row[:2] for row in rows} != set(product(xs, ys)) or min(row[2] for row in rows) <= 0:
            raise ConfigError(f"{name}: {kind} is no complete grid of times above 0: measure again")
    if not (profile.subject.model + profile.subject.server).isprintable():
        raise ConfigError(f"{name}: the names in it have characters that cannot be printed")
    return profile
