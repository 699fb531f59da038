"""What `--help` prints of a service: all of its settings, each with its default and what its Struct says of it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import get_origin

from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo, fields

from shared.config import PREFIX, SECRETS, words

WIDTH = 110


def usage(program: str, schema: type[Struct]) -> str:
    """The text; it ends with a new line."""
    head = [
        f"usage: {program} [--config FILE] [--SETTING VALUE]… [--check | --check-settings]",
        "",
        "--check starts nothing: its exit status is 0 where the settings and the files that they name would do, or 2",
        "with the reason; --check-settings looks at no file but --config's.",
        "",
        f"A setting comes from its flag, or from the environment ({PREFIX}TABLE_FIELD), or from the file,",
        "which is TOML, in this order; or it is its default, which stands behind it here.",
    ]
    return "\n".join([*head, *_lines(schema, ()), ""])


def _lines(schema: type[Struct], above: tuple[str, ...]) -> Iterator[str]:
    """Of one table; the tables within it come behind its own settings."""
    said = _said(schema)
    yield ""
    yield from _wrapped(f"[{'.'.join(above)}]  {inspect.getdoc(schema)}" if above else inspect.getdoc(schema) or "", "")
    tables: list[tuple[str, type[Struct]]] = []
    for field in fields(schema):
        if isinstance(field.type, type) and issubclass(field.type, Struct):
            tables.append((field.name, field.type))
            continue
        yield f"  {_name((*above, field.name), field)}{_default(field)}"
        yield from _wrapped(said.get(field.name, ""), "      ")
    for name, table in tables:
        yield from _lines(table, (*above, name))


def _name(path: tuple[str, ...], field: FieldInfo) -> str:
    """Where it is set, and to which words."""
    if field.name in SECRETS:
        return f"{PREFIX}{'_'.join(path).upper()}  no flag, which `ps` would show; …_FILE names a file that has it"
    choices, flag = words(field.type), "--" + "-".join(path).replace("_", "-")
    if get_origin(field.type) is dict:
        flag += " NAME=VALUE,…"
    return flag + (f" ({', '.join(choices)})" if choices else "")


def _default(field: FieldInfo) -> str:
    """As it would be typed; nothing where it is empty."""
    if field.required:
        return "  needed"
    given = field.default
    if given is NODEFAULT:  # one that is made, as of a table
        return ""
    text = ",".join(map(str, given)) if isinstance(given, tuple) else str(given)
    return f"  {text.lower() if isinstance(given, bool) else text}" if text else ""


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent=indent, subsequent_indent=indent)


def _said(schema: type[Struct]) -> dict[str, str]:
    """Field → the docstring below it, which Python itself passes over."""
    [declared] = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(declared, ast.ClassDef)
    return {
        field.target.id: said.value.value
        for field, said in pairwise(declared.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant) and isinstance(said.value.value, str)
    }
