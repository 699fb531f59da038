"""Functions are short: ruff holds how many branches and statements they have (pyproject.toml), this file the lines."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINES_LIMIT = 60
LONG = {
    ("services/worker/native/cuda/weights.py", "load_cuda_weights"): "a table of the names in a checkpoint",
}
"""Functions that may be longer, each with the reason."""


def _long_functions() -> set[tuple[str, str]]:
    return {
        (str(path.relative_to(ROOT)), function.name)
        for top in ("shared", "services", "deploy", "benchmarks")
        for path in (ROOT / top).rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and (function.end_lineno or 0) - function.lineno >= LINES_LIMIT
    }


def test_no_function_has_more_than_sixty_lines_except_those_with_a_reason() -> None:
    assert _long_functions() == LONG.keys()
