"""Compares the names that we use of vLLM with the sources of one, without importing it.

    used_names ──▶ missing_names ◀── the sources of an installed vLLM, of a directory or of a wheel
                        │
                        ▼
    "vllm.v1.engine.async_llm.AsyncLLM.add_request has no parameter data_parallel_rank", …

A machine without a GPU cannot import a vLLM for GPUs, and an old one may not be importable at all. Its sources can be
read anywhere: classes with their methods, fields and attributes, also those that they inherit within vLLM.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from itertools import chain

from services.worker.vllm.used_names import Parameters, Table, Used

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Found = tuple["_Module", ast.stmt]
"""A definition, and the module that it is in."""


def missing_names(table: Table, root: Traversable) -> list[str]:
    """Return what the vLLM in `root`, the directory above its package, lacks of the table, a line each. Empty if there
    is all of it."""
    sources = _Sources(root)
    return [fault for name, used in table.items() for fault in _faults(sources, name, used)]


def _faults(sources: _Sources, name: str, used: Used) -> Iterator[str]:
    module, _, member = name.partition(":")
    if sources.module(module) is None:
        yield f"there is no module {module}"
        return
    found = sources.find(module, member)
    shown = f"{module}.{member}"
    if found is None:
        yield f"there is no {shown}"
        return
    where, node = found
    if isinstance(node, ast.ClassDef):
        yield from _class_faults(_Class(sources, where, node), shown, used)
    elif isinstance(node, _Function):
        yield from _parameter_faults(shown, _parameters(node), used.passes)
    else:
        words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
        yield from (f"{shown} has no {each}" for each in used.reads if each not in words)


def _class_faults(found: _Class, shown: str, used: Used) -> Iterator[str]:
    yield from _parameter_faults(shown, found.constructor(), used.passes)
    yield from (f"{shown} has no attribute {each}" for each in used.reads if each not in found.attributes())
    for name, passes in used.calls.items():
        method = found.method(name)
        if method is None:
            yield f"{shown} has no method {name}"
        else:
            yield from _parameter_faults(f"{shown}.{name}", _parameters(method, bound=True), passes)
    for name, needed in used.overrides.items():
        method = found.method(name)
        if method is None:
            yield f"{shown} has no method {name}"
        elif tuple(has := _parameters(method, bound=True).names) != needed:
            yield f"{shown}.{name} takes {has}, not {list(needed)}"


def _parameter_faults(shown: str, has: _Parameters, passes: Parameters) -> Iterator[str]:
    by_place = passes[: passes.index("/")] if "/" in passes else ()
    for place, name in enumerate(by_place):
        if not has.any_place and has.places[place : place + 1] != [name]:
            yield f"{shown} has no parameter {name} at place {place + 1}"
    for name in passes[len(by_place) + bool(by_place) :]:
        if not has.any_name and name not in has.names:
            yield f"{shown} has no parameter {name}"


class _Parameters:
    """The parameters of a function."""

    def __init__(self, names: list[str], places: list[str], *, any_name: bool = False, any_place: bool = False) -> None:
        """`places` are those that may be given by position. `any_name`: there is `**`; `any_place`: there is `*`."""
        self.names, self.places, self.any_name, self.any_place = names, places, any_name, any_place


def _parameters(node: _Function, *, bound: bool = False) -> _Parameters:
    """Return a function's parameters; `bound` leaves out self or cls."""
    given = node.args
    places = [each.arg for each in (*given.posonlyargs, *given.args)]
    static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in node.decorator_list)
    places = places[1:] if bound and not static else places
    names = [*places, *(each.arg for each in given.kwonlyargs)]
    return _Parameters(names, places, any_name=given.kwarg is not None, any_place=given.vararg is not None)


class _Module:
    """The names that a module's source defines or imports, also under `if` and `try`."""

    def __init__(self, name: str, source: str, *, package: bool) -> None:
        self.name = name
        self.defined: dict[str, ast.stmt] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        """Name → the module and the name that it is imported from; an empty name stands for the module itself."""
        self._package = name if package else name.rpartition(".")[0]
        self._read(ast.parse(source).body)

    def _read(self, body: list[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    self.defined[name] = node
                case ast.Assign() | ast.AnnAssign():
                    self.defined.update(dict.fromkeys(_targets(node), node))
                case ast.ImportFrom(module=module, names=names, level=level):
                    origin = ".".join(each for each in (self._above(level), module) if each)
                    self.imported.update({each.asname or each.name: (origin, each.name) for each in names})
                case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                    self._read([*inner, *other])
                case _:
                    pass

    def _above(self, level: int) -> str:
        """Return the package of a relative import; empty for an absolute one."""
        parts = self._package.split(".")
        return ".".join(parts[: len(parts) + 1 - level]) if level else ""


class _Sources:
    """The modules of one vLLM, each read once."""

    def __init__(self, root: Traversable) -> None:
        self._root = root
        self._modules: dict[str, _Module | None] = {}

    def module(self, name: str) -> _Module | None:
        """Return a module. None if there is none, or if it cannot be read as Python."""
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def find(self, module: str, name: str) -> _Found | None:
        """Return what defines a name, wherever it is imported from within vLLM."""
        seen: set[tuple[str, str]] = set()
        while (module, name) not in seen and (loaded := self.module(module)) is not None:
            seen.add((module, name))
            if name in loaded.defined:
                return loaded, loaded.defined[name]
            module, name = loaded.imported.get(name, ("", ""))
        return None

    def _load(self, name: str) -> _Module | None:
        parts = name.split(".")
        for path, package in (((*parts, "__init__.py"), True), ((*parts[:-1], f"{parts[-1]}.py"), False)):
            file = self._root
            for part in path:
                file = file / part
            if file.is_file():
                try:
                    return _Module(name, file.read_text(encoding="utf-8"), package=package)
                except (SyntaxError, ValueError):  # a newer Python's, or no text
                    return None
        return None


class _Class:
    """A class with what it inherits within vLLM."""

    def __init__(self, sources: _Sources, module: _Module, node: ast.ClassDef) -> None:
        self._line = [node]
        """The class and its bases, the nearest ones first."""
        waiting = [(module, node)]
        for where, each in waiting:
            for base in each.bases:
                named = base.value if isinstance(base, ast.Subscript) else base
                found = sources.find(where.name, named.id) if isinstance(named, ast.Name) else None
                if found is not None and isinstance(found[1], ast.ClassDef) and found[1] not in self._line:
                    self._line.append(found[1])
                    waiting.append((found[0], found[1]))

    def method(self, name: str) -> _Function | None:
        """Return the method that objects of the class have."""
        return next((each for each in self._methods() if each.name == name), None)

    def attributes(self) -> set[str]:
        """Return the names of fields, properties, methods, and of what methods set of self."""
        names = {each.name for each in self._methods()}
        for node in self._body():
            if isinstance(node, ast.Assign | ast.AnnAssign):
                names.update(_targets(node))
        for method in self._methods():
            for each in ast.walk(method):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    names.add(each.attr)
        return names

    def constructor(self) -> _Parameters:
        """Return the parameters of `__init__`, or the fields of a class that has none, those of bases first."""
        method = self.method("__init__")
        if method is not None:
            return _parameters(method, bound=True)
        bodies = (each.body for each in reversed(self._line))
        fields = [name for node in chain(*bodies) if isinstance(node, ast.AnnAssign) for name in _targets(node)]
        return _Parameters(fields, fields)

    def _body(self) -> Iterator[ast.stmt]:
        return chain(*(each.body for each in self._line))

    def _methods(self) -> Iterator[_Function]:
        return (node for node in self._body() if isinstance(node, _Function))


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the names that an assignment sets."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
