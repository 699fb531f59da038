"""Changes the text of a keys file and keeps its comments and order. Pure.

The text is edited by lines, and the result is parsed: it must hold what was there before, and the one change. A file
in which that does not work by lines is refused instead of written wrongly.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from shared.errors import ConfigError

Entry = Mapping[str, str | int]
"""The digest of a key (`sha256`) and its limits."""
KEYS_LIMIT = 1000
"""The maximum number of keys in a file: a frontend refuses a larger one."""
_HEADER = re.compile(r"\s*\[")


def entries(text: str) -> dict[str, dict[str, Any]]:
    """Return name → entry. Raise ConfigError."""
    try:
        found = json.loads(text) if _is_json(text) else tomllib.loads(text)
    except (ValueError, RecursionError):  # the parsers' words may show a key in the place of a digest
        raise ConfigError("neither TOML nor JSON") from None
    for name, entry in found.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{name}: not a table with `sha256`")
    return dict(found)


def add_entry(text: str, name: str, entry: Entry) -> str:
    """Return the text with one more entry. Raise ConfigError if the name is there, or the file is full."""
    before = entries(text)
    if name in before:
        raise ConfigError(f"{name}: this name is there already; choose another, or revoke it first")
    if len(before) >= KEYS_LIMIT:
        raise ConfigError(f"the file has {len(before)} keys; at most {KEYS_LIMIT} are allowed")
    after = before | {name: dict(entry)}
    if _is_json(text):
        return json.dumps(after, indent=2) + "\n"
    whole = text if not text or text.endswith("\n") else text + "\n"
    pairs = [f"{key} = {json.dumps(value)}" for key, value in entry.items()]
    # After the header of a table, a line would be part of that table.
    return _first_of(after, (whole + line(name, entry) + "\n", "\n".join([f"{whole}\n[{name}]", *pairs, ""])))


def remove_entry(text: str, name: str) -> str:
    """Return the text without an entry. Raise ConfigError if it is not there."""
    after = entries(text)
    if name not in after:
        import difflib  # imported here, since only a mistake needs it

        near = difflib.get_close_matches(name, after, n=1)
        raise ConfigError(f"{name}: no such name in the file" + (f"; did you mean {near[0]}?" if near else ""))
    del after[name]
    if _is_json(text):
        return json.dumps(after, indent=2) + "\n"
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
    return _first_of(after, ("".join(kept),))


def line(name: str, entry: Entry) -> str:
    """Return an entry as one line of TOML."""
    return f"{name} = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in entry.items())} }}"


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
