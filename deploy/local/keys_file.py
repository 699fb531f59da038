"""Changes the text of a keys file and keeps its comments and order. Pure.

The text is edited by lines, and the result is parsed: it must hold what was there before, and the one change. A file
in which that does not work by lines is refused instead of written wrongly.

What comes out is checked as a frontend checks it (shared/api_keys.py). A frontend that cannot read the file keeps the
former keys, so a key that was revoked in such a file would stay valid.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from shared.api_keys import parse_keys, read_keys
from shared.errors import ConfigError

Entry = Mapping[str, str | int]
"""The digest of a key (`sha256`) and its limits."""
_HEADER = re.compile(r"\s*\[")


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
