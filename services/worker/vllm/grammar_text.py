"""Writes a grammar as one text of llguidance's Lark, the only form that vLLM passes on unchanged. Pure.

Frontends send Lark, or a JSON list of grammars: the first is the start, and names others as `@name`. vLLM takes JSON
for GBNF and refuses it. So each named grammar becomes a rule, and its reference that rule's name:

    start: "a" @content            start: "a" headrace_content
    content = a JSON Schema   ──▶  headrace_content: %json {…}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.errors import MALFORMED

_PREFIX = "headrace_"
_REFERENCE = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|@(?P<name>[A-Za-z_][\w-]*)')
"""A string, a comment, a regular expression or a reference: what looks like a reference in the others is none."""


def lark_text(grammar: str) -> str:
    """Return the grammar as one Lark text. Raise ValueError with the reason if it has another form."""
    if not grammar.lstrip().startswith("{"):
        return grammar
    try:
        grammars = msgspec.json.decode(grammar, type=dict[str, list[dict[str, Any]]])["grammars"]
        first = grammars[0]
    except (KeyError, IndexError, *MALFORMED):
        raise ValueError("neither Lark nor a JSON list of grammars") from None
    return _one(first, {one["name"]: one for one in grammars[1:] if isinstance(one.get("name"), str)}, ())


def _one(grammar: Mapping[str, Any], named: Mapping[str, Mapping[str, Any]], above: tuple[str, ...]) -> str:
    """Return the text of one grammar; `above` are the names of those that it stands in."""
    if "json_schema" in grammar:
        return f"start: {_schema(grammar)}"
    text = grammar.get("lark_grammar")
    if not isinstance(text, str):
        raise ValueError("a grammar that is neither lark_grammar nor json_schema")
    used: list[str] = []

    def rule(found: re.Match[str]) -> str:
        name = found["name"]
        if name is None or name not in named:
            return found[0]
        if name not in used:
            used.append(name)
        return _rule_name(name)

    lines = [_REFERENCE.sub(rule, text)]
    for name in used:
        if name in above:
            raise ValueError(f"the grammar {name} contains itself")
        part = named[name]
        inner = _schema(part) if "json_schema" in part else f"%lark {{\n{_one(part, named, (*above, name))}\n}}"
        lines.append(f"{_rule_name(name)}: {inner}")
    return "\n".join(lines)


def _rule_name(name: str) -> str:
    return _PREFIX + name.lower().replace("-", "_")


def _schema(grammar: Mapping[str, Any]) -> str:
    return f"%json {msgspec.json.encode(grammar['json_schema']).decode()}"
