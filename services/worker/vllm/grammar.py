"""Translates a grammar of `Sampling.grammar` into what vLLM's structured output takes. Pure.

    ours, as llguidance reads it                                     vLLM's
    {"grammars": [{"json_schema": S}]}                        ──▶    json = S
    {"grammars": [{"lark_grammar": L}]}, or L itself          ──▶    grammar = L
    {"grammars": [{"lark_grammar": L}, {"name": N, …}, …]}    ──▶    grammar = L, with a rule N for each other grammar

vLLM takes one text in llguidance's dialect of Lark, in which `%json` and `%lark` hold what we refer to as `@N`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec


class UnknownGrammar(ValueError):
    """The text is no grammar that vLLM can hold."""


def to_structured_output(grammar: str) -> tuple[str, str]:
    """Return ("json" or "grammar", the text). Raise UnknownGrammar."""
    if not grammar.lstrip().startswith("{"):
        return "grammar", grammar
    try:
        first, *others = msgspec.json.decode(grammar, type=dict[str, list[dict[str, Any]]])["grammars"]
    except (msgspec.MsgspecError, KeyError, ValueError):
        raise UnknownGrammar('a grammar in JSON must have the form {"grammars": [{...}, ...]}') from None
    if "json_schema" in first and not others:
        return "json", json.dumps(first["json_schema"])
    if "lark_grammar" not in first:
        raise UnknownGrammar("vLLM cannot hold several grammars of which the first is no Lark grammar")
    lark = str(first["lark_grammar"])
    for other in others:
        name = str(other.get("name", ""))
        lark = re.sub(rf"@{re.escape(name)}(?![\w-])", _rule(name), lark)
        lark += f"\n{_rule(name)}: {_inline(other)}\n"
    if re.search(r"(?<![\w\"])@[\w-]+", lark):
        raise UnknownGrammar("a grammar refers to one that is not there")
    return "grammar", lark


def _rule(name: str) -> str:
    """Return the name of a rule for the grammar of this name."""
    return "sub_" + re.sub(r"\W", "_", name).lower()


def _inline(grammar: dict[str, Any]) -> str:
    if "json_schema" in grammar:
        return f"%json {json.dumps(grammar['json_schema'])}"
    if "lark_grammar" in grammar:
        return f"%lark {{\n{grammar['lark_grammar']}\n}}"
    raise UnknownGrammar("vLLM cannot hold a grammar that is neither a JSON schema nor Lark")
