"""A module whose docstring says *Pure.* decides and does nothing; so does each module of a package that says it.

It reaches no clock, network, file, thread or device, not even through the modules that it imports.
"""

from __future__ import annotations

import ast
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = frozenset(
    [
        "aiohttp",
        "asyncio",
        "cupy",
        "etcd3",
        "nats",
        "numpy",
        "os",
        "pathlib",
        "socket",
        "subprocess",
        "threading",
        "time",
        "uvloop",
        "zmq",
    ]
)
ENOUGH = 100
"""Fewer labelled modules than this would mean that the label is not found, not that the code has changed."""


def _says_pure(path: Path) -> bool:
    return path.is_file() and "Pure." in (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")


def labelled() -> list[str]:
    """Names of the modules that are said to be pure."""
    paths = [path for top in ("shared", "services", "deploy") for path in (ROOT / top).rglob("*.py")]
    pure = [path for path in paths if _says_pure(path) or _says_pure(path.with_name("__init__.py"))]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in pure)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    built = grimp.build_graph("shared", "services", "deploy", include_external_packages=True, cache_dir=None)
    for module in built.find_modules_that_directly_import("shared.config"):
        if module.endswith(".config"):  # a settings Struct is a value; reading it is shared.config's
            built.remove_import(importer=module, imported="shared.config")
    return built


def test_a_module_that_says_pure_reaches_nothing_that_acts(graph: grimp.ImportGraph) -> None:
    names = labelled()
    assert len(names) >= ENOUGH
    reached = {name: sorted(FORBIDDEN & graph.find_upstream_modules(name)) for name in names}
    assert {name: found for name, found in reached.items() if found} == {}


def test_a_module_that_acts_would_be_found(graph: grimp.ImportGraph) -> None:
    assert "asyncio" in graph.find_upstream_modules("services.router.service")
