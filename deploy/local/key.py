"""`headrace key new|list|revoke`: makes API keys, and changes the file in `access.keys_file` (docs/access.md).

The file's text is edited by lines, which keeps its comments and order, and the result is parsed: it must hold what was
there before, and the one change. A file in which that does not work by lines is refused instead of written wrongly.

What comes out is checked as a frontend checks it (shared/api_keys.py). A frontend that cannot read the file keeps the
former keys, so a key that was revoked in such a file would stay valid.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import tomllib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from deploy.local.table import table
from shared.api_keys import FILE_LIMIT_BYTES, NAME, NAME_RULE, key_digest, parse_keys, read_keys
from shared.errors import ConfigError
from shared.installation import COMMAND
from shared.regular_file import read_regular_file

T = TypeVar("T")
PREFIX = "hr-"
"""Prefix by which people and secret scanners recognize a key."""
KEY_BYTES = 32
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency", "min_priority", "salt")
DIGITS_SHOWN = 12
"""The digits of a digest that `list` shows, to tell keys apart."""
FOLLOWED = "a running frontend follows within 2 s"
Entry = Mapping[str, str | int]
"""The digest of a key (`sha256`) and its limits."""
_HEADER = re.compile(r"\s*\[")


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
    except FileNotFoundError:
        raise ConfigError(f"--file {file}: no such file; `{COMMAND} key new NAME --file {file}` makes one") from None
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


def add_entry(text: str, name: str, entry: Entry) -> str:
    """Return the text with one more entry. Raise ConfigError if the name is there, or a frontend would refuse the
    file."""
    before = parse_keys(text.encode())
    if name in before:
        raise ConfigError(f"{name}: this name is there already; choose another, or revoke it first")
    after = before | {name: dict(entry)}
    if _is_json(text):
        return _checked(json.dumps(after, indent=2) + "\n")
    whole = text if not text or text.endswith("\n") else text + "\n"
    pairs = [f"{key} = {json.dumps(value)}" for key, value in entry.items()]
    # After the header of a table, a line would be part of that table.
    return _checked(_first_of(after, (whole + line(name, entry) + "\n", "\n".join([f"{whole}\n[{name}]", *pairs, ""]))))


def remove_entry(text: str, name: str) -> str:
    """Return the text without an entry. Raise ConfigError if it is not there, or a frontend would refuse the file."""
    after = parse_keys(text.encode())
    if name not in after:
        import difflib  # imported here, since only a mistake needs it

        near = difflib.get_close_matches(name, after, n=1)
        raise ConfigError(f"{name}: no such name in the file" + (f"; did you mean {near[0]}?" if near else ""))
    del after[name]
    if _is_json(text):
        return _checked(json.dumps(after, indent=2) + "\n")
    key = rf"""\s*(?:{re.escape(name)}|"{re.escape(name)}"|'{re.escape(name)}')\s*"""
    pair, header = re.compile(rf"{key}[=.]"), re.compile(rf"\s*\[{key}\]")
    kept: list[str] = []
    inside = below = False
    """In the table of the entry; below the first header, where a line is part of some table."""
    for each in text.splitlines(keepends=True):
        if _HEADER.match(each):
            inside, below = bool(header.match(each)), True
        blank = not each.strip() or each.lstrip().startswith("#")
        if blank or not (inside or (not below and pair.match(each))):
            kept.append(each)
    return _checked(_first_of(after, ("".join(kept),)))


def line(name: str, entry: Entry) -> str:
    """Return an entry as one line of TOML."""
    return f"{name} = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in entry.items())} }}"


def _checked(text: str) -> str:
    """Return the text. Raise ConfigError if a frontend would refuse it as its keys file."""
    read_keys(text.encode())
    return text


def _is_json(text: str) -> bool:
    return text.lstrip().startswith("{")  # no TOML file begins with a brace


def _first_of(wanted: Mapping[str, Any], texts: tuple[str, ...]) -> str:
    """Return the first text that holds what is wanted. Raise ConfigError if none does."""
    for text in texts:
        try:
            if tomllib.loads(text) == wanted:
                return text
        except tomllib.TOMLDecodeError:
            continue
    raise ConfigError("the file is written in a way that this command cannot change; edit it by hand")
