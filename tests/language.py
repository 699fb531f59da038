"""The mechanical part of our rules for plain English (CONTRIBUTING.md, "Language").

    python -m tests.language [PATH …]     prints each finding as path:line: rule: text; without paths, of the whole tree

Docstrings of the product are held to all rules, those of tests and documents to the list of words and to the rules of
grammar, other strings of the product and names of tests to the list of words.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CODE = ("shared", "services", "deploy", "benchmarks", "tests")
PRODUCT = ("shared", "services", "deploy", "benchmarks")
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/decisions/*.md",
    "deploy/compose/README.md",
    "benchmarks/README.md",
    "examples/README.md",
    "examples/*/README.md",
)

WORDS = {
    "anew": "again",
    "beside": "next to, in addition to",
    "besides": "in addition",
    "behind": "after",
    "lest": "so that … not",
    "told": "reported, notified",
    "nobody": "no client, no worker, …",
    "somebody": "a client, a worker, …",
    "whoever": "the client that …",
    "whom": "the client that …",
    "shall": "must",
    "he": "it, or its name",
    "him": "it, or its name",
    "his": "its",
    "thereby": "so",
    "therein": "in it",
    "thereof": "of it",
    "hitherto": "so far",
}
"""Words that are not used, and what to say in their place."""
PHRASES = {"as such": "leave it out", "by and by": "later", "not any more": "no longer", "so many": "how many, N"}
ALLOWED = re.compile(
    r"behind (?:a|an|the|its|your) (?:\w+ )?(?:proxy|proxies|balancer|firewall)"  # a place in a network, not a time
    r"|(?:leav\w*|left) (?:\w+ ){0,3}behind|(?:told|tell) apart"
    r"|behind-envoy",  # the name of a directory
    re.IGNORECASE,
)
"""Idioms that use a word of the list in its plain sense."""
_FORBIDDEN = re.compile(rf"\b(?:{'|'.join([*WORDS, *PHRASES])})\b", re.IGNORECASE)
_BEGINNINGS = re.compile(
    r"(?:Of|As|See|It|They|Them|That|Those|These|Whether it|Who|Whom|Whose|And|Or|But|Also|Likewise|The same|Ditto)\b|…"
)
"""A first sentence that begins so has no noun of its own."""
SENTENCE_WORDS = 36
"""At most in one sentence; 20 is the aim."""
FEWEST_WORDS = 3
"""At least in a docstring: fewer say nothing that the name does not."""
_CODE = re.compile(r"``?[^`]*``?")
_SPECIAL = r"(?:empty|none|null|zero|0|-1|true|false|unset|unknown|absent)"
_EMPTY_CASE = re.compile(rf"(?:[.;,(]\s+|\A|\n\s*\n\s*){_SPECIAL}:\s", re.IGNORECASE)
"""`X; empty: Y`, which is two sentences, `X. Empty if Y.`"""
_WHERE = re.compile(
    rf"\braises?\s[A-Z]\w+(?:\s\([A-Z, ]+\))?(?:(?:,|\sand|\sor)+\s[A-Z]\w+)*,?\s+where\b"  # Raise X where …
    rf"|\b{_SPECIAL},?\s+where\b"  # None where …
    r"|\bwhere\s(?:there\s+(?:is|are|was|were)|none|nothing)\b",
    re.IGNORECASE,
)
"""`where` for a condition."""
_INVERTED = re.compile(r"(?:(?<=[.:;!?]\s)|\A|(?<=\n\n))(?:Of (?!these\b|those\b)|So long )(?=\w)")
"""A sentence that begins with what belongs after its verb."""


class Finding(NamedTuple):
    """One breach of one rule."""

    path: str
    line: int
    rule: str
    text: str


def words(text: str) -> Iterator[tuple[int, str]]:
    """Forbidden words and phrases in `text`, each with the number of lines before it."""
    plain = ALLOWED.sub(lambda match: " " * len(match[0]), _CODE.sub(lambda match: " " * len(match[0]), text))
    for match in _FORBIDDEN.finditer(plain):
        found = match[0].lower()
        yield text.count("\n", 0, match.start()), f"{found!r}: say {WORDS.get(found) or PHRASES[found]}"


def grammar(text: str) -> Iterator[tuple[int, str]]:
    """Sentences of another order than English has, each with the number of lines before it.

    Pictures, tables of two columns and what stands between backquotes are passed over.
    """
    kept = (" " * len(line) if re.search(r"\S\s{3,}\S|[│├└─]", line) else line for line in text.split("\n"))
    plain = _CODE.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), "\n".join(kept))
    for pattern, wrong in (
        (_EMPTY_CASE, "write a sentence of its own, such as 'Empty if …' or '0 means …'"),
        (_WHERE, "say 'if' for a condition"),
        (_INVERTED, "begin with the subject"),
    ):
        for match in pattern.finditer(plain):
            lines = text.count("\n", 0, match.end() - 1)
            yield lines, f"{' '.join(text[match.start() : match.end() + 20].split())!r}: {wrong}"


def docstring(text: str) -> Iterator[tuple[int, str]]:
    """Breaches in one docstring, each with the number of lines before it."""
    first, *_ = paragraphs = re.split(r"\n\s*\n", text.strip())
    if _BEGINNINGS.match(first):
        yield 0, f"begins with {first.split()[0]!r}: begin with the thing that it is about"
    if text.rstrip().endswith("…"):
        yield 0, "ends in the middle of a sentence"
    if len(first.split()) < FEWEST_WORDS:
        yield 0, f"{first!r}: too short to say anything"
    for paragraph in paragraphs:
        if re.search(r"^\s{2,}|  |──|[│├└]|^\s*[-*>|]", paragraph, re.MULTILINE) and paragraph is not first:
            continue  # a picture, a table, a list
        for sentence in re.split(r"(?<=[.:;!?])\s+", _CODE.sub("x", paragraph)):
            if len(sentence.split()) > SENTENCE_WORDS:
                yield 0, f"a sentence of {len(sentence.split())} words: {' '.join(sentence.split()[:6])} …"


def _docstrings(nodes: Sequence[ast.AST]) -> Iterator[ast.Constant]:
    """Every string that stands alone as a statement: of modules, classes, functions, attributes."""
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as constant):
                yield constant


def in_code(path: Path, root: Path = ROOT) -> Iterator[Finding]:
    """Findings in one Python file."""
    name = str(path.relative_to(root))
    source = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    in_product = name.startswith(PRODUCT)
    is_shown = in_product and not name.startswith("benchmarks")  # goals keep the names that stored results have
    documented = set()
    for constant in _docstrings(nodes):
        documented.add(id(constant))
        text = str(constant.value)
        for lines, wrong in words(text):
            yield Finding(name, constant.lineno + lines, "word", wrong)
        for lines, wrong in grammar(text):
            yield Finding(name, constant.lineno + lines, "grammar", wrong)
        if in_product:
            for lines, wrong in docstring(text):
                yield Finding(name, constant.lineno + lines, "docstring", wrong)
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)) if is_shown and id(node) not in documented and " " in text:
                for _, wrong in words(text):
                    yield Finding(name, node.lineno, "string", wrong)
            case ast.FunctionDef(name=function) | ast.AsyncFunctionDef(name=function) if function.startswith("test_"):
                for _, wrong in words(function.replace("_", " ")):
                    yield Finding(name, node.lineno, "test name", wrong)
    for number, line in enumerate(source.splitlines(), 1):
        if (comment := re.search(r"(?:^|\s)# (.*)", line)) and in_product:
            for _, wrong in words(comment[1]):
                yield Finding(name, number, "comment", wrong)


def in_document(path: Path, root: Path = ROOT) -> Iterator[Finding]:
    """Findings in one document; code in it is passed over."""
    text = re.sub(
        r"^```.*?^```", lambda match: re.sub(r"[^\n]", " ", match[0]), path.read_text("utf-8"), flags=re.S | re.M
    )
    for lines, wrong in words(text):
        yield Finding(str(path.relative_to(root)), 1 + lines, "word", wrong)
    for lines, wrong in grammar(text):
        yield Finding(str(path.relative_to(root)), 1 + lines, "grammar", wrong)


def findings(paths: Sequence[Path] = ()) -> Iterator[Finding]:
    """All findings below `paths`, or in the whole tree."""
    chosen = [path.resolve() for path in paths] or [ROOT]
    code = [path for top in CODE for path in sorted((ROOT / top).rglob("*.py"))]
    documents = [path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))]
    for path in code + documents:
        if any(path == each or path.is_relative_to(each) for each in chosen):
            yield from in_code(path) if path.suffix == ".py" else in_document(path)


if __name__ == "__main__":
    found = list(findings([Path(each) for each in sys.argv[1:]]))
    print("\n".join(f"{each.path}:{each.line}: {each.rule}: {each.text}" for each in found))
    sys.exit(bool(found))
