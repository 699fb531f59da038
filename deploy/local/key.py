"""`headrace key new|list|revoke`: makes API keys, and changes the file in `access.keys_file` (docs/access.md)."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from deploy.local.keys_file import add_entry, entries, line, remove_entry
from deploy.local.table import table
from shared.errors import ConfigError

T = TypeVar("T")
PREFIX = "hr-"
"""Prefix by which people and secret scanners recognize a key."""
KEY_BYTES = 32
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency")
DIGITS_SHOWN = 12
"""The digits of a digest that `list` shows, to tell keys apart."""
FOLLOWED = "a running frontend follows within 2 s"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""Names that the frontend accepts."""


def new(name: str, limits: dict[str, int | None], file: Path | None = None, out: Path | None = None) -> None:
    """Make a key. Its line goes into `file`, the key itself into the new file `out`; without one, it is printed.

    Raise ConfigError, and then leave both files as they were.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name}: a name is 1 to 64 of a-z, 0-9, - and _, and begins with a letter or digit")
    for limit, value in limits.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{limit.replace('_', '-')} is at least 1")
    if file is not None and out is not None and file.resolve() == out.resolve():
        raise ConfigError("--file and --out must be different files")
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry: dict[str, str | int] = {
        "sha256": digest,
        **{limit: value for limit, value in limits.items() if value is not None},
    }
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
    rows = (
        (name, *(entry.get(limit) for limit in LIMITS), str(entry.get("sha256", ""))[:DIGITS_SHOWN])
        for name, entry in sorted(_parsed(file, entries, _read(file)).items())
    )
    return table("NAME  REQUESTS/MINUTE  TOKENS/MINUTE  CONCURRENCY  SHA256", rows)


def revoke(name: str, file: Path) -> None:
    """Remove a key from a keys file. Raise ConfigError if it is not there."""
    _change(file, lambda text: remove_entry(text, name))
    print(f"{name} is no longer in {file}; {FOLLOWED}, and its running requests continue")


def _write_new(file: Path, text: str) -> None:
    """Write a file that only its owner can read. Raise FileExistsError if it is there."""
    file.touch(mode=0o600, exist_ok=False)
    with file.open("w", encoding="utf-8") as new_file:
        new_file.write(text)
        new_file.flush()
        os.fsync(new_file.fileno())


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not UTF-8") from None
    except OSError as wrong:
        raise ConfigError(f"{file}: {wrong.strerror}") from None


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
