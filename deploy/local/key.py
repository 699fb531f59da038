"""`headrace key new|list|revoke`: makes API keys, and changes the file in `access.keys_file` (docs/access.md)."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from deploy.local.keys_file import add_entry, line, remove_entry
from deploy.local.table import table
from shared.api_keys import FILE_LIMIT_BYTES, NAME, NAME_RULE, key_digest, read_keys
from shared.errors import ConfigError
from shared.regular_file import read_regular_file

T = TypeVar("T")
PREFIX = "hr-"
"""Prefix by which people and secret scanners recognize a key."""
KEY_BYTES = 32
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency", "min_priority", "salt")
DIGITS_SHOWN = 12
"""The digits of a digest that `list` shows, to tell keys apart."""
FOLLOWED = "a running frontend follows within 2 s"


def new(name: str, limits: dict[str, int | str | None], file: Path | None = None, out: Path | None = None) -> None:
    """Make a key. Its line goes into `file`, the key itself into the new file `out`; without one, it is printed.

    Raise ConfigError, and then leave both files as they were.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name}: {NAME_RULE}")
    if file is not None and out is not None and file.resolve() == out.resolve():
        raise ConfigError("--file and --out must be different files")
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    entry: dict[str, str | int] = {"sha256": key_digest(key).hex()}
    for limit, value in limits.items():
        if value is not None:
            _check_limit(limit, value)
            entry[limit] = value
    with ExitStack() as undo:
        if out is not None:
            try:
                _write_new(out, key + "\n")
            except FileExistsError:
                raise ConfigError(f"--out {out}: this file is there already, and is not replaced") from None
            except OSError as wrong:
                raise ConfigError(f"--out {out}: {wrong.strerror}") from None
            undo.callback(out.unlink)
        if file is not None:
            _change(file, lambda text: add_entry(text, name, entry), create=True)
        undo.pop_all()
    if out is None:
        print(f"The key of {name}, shown only this once:\n\n    {key}\n")
    else:
        print(f"The key of {name} is in {out}")
    if file is None:
        print(f"Add this line to the frontends' access.keys_file:\n\n{line(name, entry)}")
    else:
        print(f"{name} is in {file}; {FOLLOWED}")


def listed(file: Path) -> str:
    """Return the names and limits in a keys file, as a table. Raise ConfigError."""
    entries = _parsed(file, lambda text: read_keys(text.encode()), _read(file))
    rows = (
        (name, *(getattr(entry, limit) for limit in LIMITS), entry.sha256[:DIGITS_SHOWN])
        for name, entry in sorted(entries.items())
    )
    return table("NAME  REQUESTS/MINUTE  TOKENS/MINUTE  CONCURRENCY  MIN PRIORITY  SALT  SHA256", rows)


def revoke(name: str, file: Path) -> None:
    """Remove a key from a keys file. Raise ConfigError if it is not there."""
    _change(file, lambda text: remove_entry(text, name))
    print(f"{name} is no longer in {file}; {FOLLOWED}, and its running requests continue")


def _check_limit(limit: str, value: int | str) -> None:
    """Raise ConfigError, which names the flag, for a limit that a frontend would refuse."""
    try:
        read_keys(line("any", {"sha256": "0" * 64, limit: value}).encode())
    except ConfigError as wrong:
        why = str(wrong).removeprefix("any: ").partition(" - at ")[0]
        raise ConfigError(f"--{limit.replace('_', '-')} {value}: {why}") from None


def _write_new(file: Path, text: str) -> None:
    """Write a file that only its owner can read. Raise FileExistsError if it is there, and OSError if it cannot be
    written whole; then nothing of it is left."""
    file.touch(mode=0o600, exist_ok=False)
    try:
        with file.open("w", encoding="utf-8") as new_file:
            new_file.write(text)
            new_file.flush()
            os.fsync(new_file.fileno())
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def _read(file: Path) -> str:
    try:
        return read_regular_file(file, FILE_LIMIT_BYTES).decode("utf-8")
    except OSError as wrong:
        raise ConfigError(f"{file}: {wrong.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not UTF-8") from None


def _parsed(file: Path, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ConfigError as wrong:
        raise ConfigError(f"{file}: {wrong}") from None


def _change(file: Path, change: Callable[[str], str], *, create: bool = False) -> None:
    """Replace the file's text at once, so that a frontend reads the old text or the new one. The file keeps its mode
    and owner, a link stays a link, and of several such commands one follows the other."""
    file = file.resolve()
    try:
        directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as wrong:
        raise ConfigError(f"{file.parent}: {wrong.strerror}") from None
    with ExitStack() as last:
        last.callback(os.close, directory)
        fcntl.flock(directory, fcntl.LOCK_EX)
        old = file.stat() if file.exists() else None
        text = _parsed(file, change, "" if old is None and create else _read(file))
        fresh = file.with_name(f".{file.name}.new")
        last.callback(fresh.unlink, missing_ok=True)
        try:
            fresh.unlink(missing_ok=True)  # from a command that was killed
            _write_new(fresh, text)
            if old is not None:
                os.chown(fresh, old.st_uid, old.st_gid)
                fresh.chmod(old.st_mode & 0o777)
            fresh.replace(file)
        except OSError as wrong:
            raise ConfigError(f"{file}: {wrong.strerror}") from None
