"""What is malformed raises what its readers catch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shared.errors import MALFORMED

ROOT = Path(__file__).resolve().parents[2]
_OF_MSGSPEC = {"MsgspecError", "DecodeError"}
_PROTOBUF = "services/frontend/picker/wire.py"


def _names(types: list[ast.expr]) -> set[str]:
    """The last words of what a handler catches."""
    flat = [each for one in types for each in (one.elts if isinstance(one, ast.Tuple) else [one])]
    return {ast.unparse(one).rpartition(".")[2].lstrip("*") for one in flat}


def _caught(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """The line and the names of each statement that catches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            yield node.lineno, _names([handler.type for handler in node.handlers if handler.type is not None])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            yield node.lineno, _names(node.args)


def test_a_module_that_catches_malformed_bytes_catches_all_kinds_of_them() -> None:
    """msgspec's own error lacks texts that are not UTF-8, and nesting that is too deep."""
    lacking = [
        f"{path.relative_to(ROOT)}:{line}"
        for top in ("shared", "services", "deploy")
        for path in (ROOT / top).rglob("*.py")
        if str(path.relative_to(ROOT)) != _PROTOBUF
        for line, names in _caught(ast.parse(path.read_text(encoding="utf-8")))
        if _OF_MSGSPEC & names
        and not ({"UnicodeDecodeError", "UnicodeError", "ValueError"} & names and "RecursionError" in names)
        and "Exception" not in names
    ]
    assert not lacking, "catch shared.errors.MALFORMED"


@pytest.mark.parametrize(
    "content", [b"{", b'{"a": "\xe9"}', b'{"a": ' + b"[" * 100_000, b'{"\xff": 1}', '{"a": "\ud800"}', b'{"a": 1e999}']
)
def test_whatever_is_malformed_is_named(content: bytes | str) -> None:
    with pytest.raises(MALFORMED):
        msgspec.json.decode(content, type=dict[str, msgspec.Raw | str | float | list[object]])
