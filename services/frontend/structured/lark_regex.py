"""Turns a Lark grammar whose rules do not contain themselves into one regular expression. Pure.

The input of a custom tool is a text within JSON. llguidance follows a regular expression there, with JSON's escapes,
but no grammar.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

LIMIT_CHARACTERS = 32 << 10
"""Characters of the expression, and of each part of it."""
DEPTH_LIMIT = 100
"""Rules and brackets within one another."""
_DEFINITION = re.compile(r"^[?!]?([a-zA-Z_]\w*)(?:\.-?\d+)?\s*:", re.MULTILINE)
_IMPORT = re.compile(r"^%import\s+common(?:\.(\w+)(?:\s*->\s*(\w+))?|\s*\(([^)]*)\))$")
_TOKEN = re.compile(
    r"""(?P<white>\s+|//[^\n]*|\#[^\n]*)|(?P<alias>->\s*\w+)|(?P<text>"(?:\\.|[^"\\\n])*")(?P<case>i?)"""
    r"""|/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[imsx]*)|(?P<times>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\d*,?\d*\})"""
    r"""|(?P<name>[a-zA-Z_]\w*)|(?P<mark>[()\[\]|?*+])"""
)
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LETTER": "[a-zA-Z]",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "ESCAPED_STRING": r'"(?:\\.|[^"\\\n])*"',
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "NEWLINE": r"(?:\r?\n)+",
    "LF": r"\n",
    "CR": r"\r",
}
"""Lark's own terminals."""


class NotRegular(Exception):
    """The grammar cannot be turned into a regular expression; the message is the reason."""


def lark_regex(grammar: str) -> str:
    """Return the regular expression of the texts of a grammar's rule `start`. Raise NotRegular."""
    lines: list[str] = []
    known: dict[str, str] = {}
    for line in grammar.splitlines():
        if not line.startswith("%"):
            lines.append(line)
            continue
        if (found := _IMPORT.match(line.rstrip())) is None:
            raise NotRegular(f"{line.split()[0]} is not supported, except %import of terminals of `common`")
        wanted = [found[1]] if found[1] else re.findall(r"\w+", found[3])
        for name in wanted:
            if name not in _COMMON:
                raise NotRegular(f"there is no terminal common.{name}")
            known[found[2] or name] = f"(?:{_COMMON[name]})"
    text = "\n".join(lines)
    begun = list(_DEFINITION.finditer(text))
    ends = [*(one.start() for one in begun[1:]), len(text)]
    bodies = {one[1]: text[one.end() : end] for one, end in zip(begun, ends, strict=True)}
    return _Reader(bodies, known).rule("start", ())


class _Reader:
    """Reads the definitions of a grammar, each when it is needed."""

    def __init__(self, bodies: dict[str, str], known: dict[str, str]) -> None:
        self._bodies = bodies
        self._known = known
        self._depth = 0

    def rule(self, name: str, within: tuple[str, ...]) -> str:
        """Return the expression of a rule or a terminal that is needed `within` others. Raise NotRegular."""
        if name not in self._known:
            if name in within:
                raise NotRegular(f"the rule {name!r} contains itself")
            if name not in self._bodies:
                raise NotRegular(f"there is no rule {name!r}")
            tokens = _tokens(self._bodies[name])
            self._known[name] = self._either(tokens, (*within, name), "")
        return self._known[name]

    def _either(self, tokens: Iterator[re.Match[str]], within: tuple[str, ...], close: str) -> str:
        """Read alternatives up to a closing mark, or to the end."""
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise NotRegular(f"it is nested deeper than {DEPTH_LIMIT} levels")
        sequences: list[list[str]] = [[]]
        length = 0
        for token in tokens:
            kind, mark = token.lastgroup, token["mark"]
            items = sequences[-1]
            if kind == "alias":
                continue
            if mark == "|":
                sequences.append([])
                continue
            if mark in ("(", "["):
                items.append(self._either(tokens, within, ")" if mark == "(" else "]") + ("?" if mark == "[" else ""))
            elif mark in (")", "]") and mark == close:
                close = ""
                break
            elif mark in ("?", "*", "+") and items:
                length -= len(items[-1])
                items[-1] = f"(?:{items[-1]}){mark}"
            elif token["times"] and items:
                length -= len(items[-1])
                least, _, most = re.sub(r"[~{}\s]", "", token["times"]).replace("..", ",").partition(",")
                bounds = f"{least or 0},{most}" if _ else least
                items[-1] = f"(?:{items[-1]}){{{bounds}}}"
            elif token["name"]:
                items.append(self.rule(token["name"], within))
            elif token["text"]:
                literal = re.escape(_unquoted(token["text"]))
                items.append(f"(?i:{literal})" if token["case"] else literal)
            elif token["regex"]:
                flags, regex = token["flags"], token["regex"].replace("\\/", "/")
                items.append(f"(?{flags}:{regex})")
            else:
                raise NotRegular(f"{token[0]!r} is in a wrong place")
            length += len(items[-1])
            if length + len(sequences) > LIMIT_CHARACTERS:  # before a part is joined that repeats others
                raise NotRegular(f"its regular expression has more than {LIMIT_CHARACTERS} characters")
        if close:
            raise NotRegular(f"{close!r} is missing")
        self._depth -= 1
        return f"(?:{'|'.join(''.join(items) for items in sequences)})"


def _unquoted(text: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        raise NotRegular(f"{text} has an unknown escape") from None


def _tokens(body: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(body):
        found = _TOKEN.match(body, at)
        if found is None:
            raise NotRegular(f"{body[at : at + 20]!r} is not supported")
        at = found.end()
        if found["white"] is None:
            yield found
