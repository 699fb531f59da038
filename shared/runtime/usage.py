"""The text of `--help`: all settings of a service, each with its default and the docstring of its field."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import get_origin

from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo, fields

from shared.config import PREFIX, SECRETS, literal_values

WIDTH = 110


def usage(program: str, schema: type[Struct]) -> str:
    """Return the text of `--help`, which ends with a new line."""
    head = [
        f"usage: {program} [--config FILE] [--SETTING VALUE]… [--check | --check-settings]",
        "",
        "--check starts nothing. Its exit status is 0 if the settings and the files that they name are valid, else 2",
        "with the reason. --check-settings reads no file except that of --config.",
        "",
        f"A setting comes from its flag, else from the environment ({PREFIX}TABLE_FIELD), else from the file,",
        "which is TOML. Without any of them it has its default, which follows its name here.",
    ]
    return "\n".join([*head, *_lines(schema, ()), ""])


def _lines(schema: type[Struct], above: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of one table. The tables in it follow its own settings."""
    said = field_docstrings(schema)
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
    """Return the flag or the variable of a setting, and its allowed words."""
    if field.name in SECRETS:
        return f"{PREFIX}{'_'.join(path).upper()}  not a flag, since `ps` would show it; …_FILE names a file with it"
    choices, flag = literal_values(field.type), "--" + "-".join(path).replace("_", "-")
    if get_origin(field.type) is dict:
        flag += " NAME=VALUE,…"
    return flag + (f" ({', '.join(choices)})" if choices else "")


def _default(field: FieldInfo) -> str:
    """Return the default as it would be typed; empty if it is empty."""
    if field.required:
        return "  required"
    given = field.default
    if given is NODEFAULT:  # a default that is made, as that of a table
        return ""
    text = ",".join(map(str, given)) if isinstance(given, tuple) else str(given)
    return f"  {text.lower() if isinstance(given, bool) else text}" if text else ""


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent=indent, subsequent_indent=indent)


def field_docstrings(schema: type[Struct]) -> dict[str, str]:
    """Return the docstring below each field, also of inherited ones. Python itself ignores these docstrings."""
    found: dict[str, str] = {}
    for declared in schema.__mro__[: schema.__mro__.index(Struct)]:
        [node] = ast.parse(textwrap.dedent(inspect.getsource(declared))).body
        assert isinstance(node, ast.ClassDef)
        found |= {
            field.target.id: said.value.value
            for field, said in pairwise(node.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant) and isinstance(said.value.value, str)
        }
    return found
