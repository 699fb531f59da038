"""Which tests `./check --changed` runs: those of the changed files and of the modules that import them. Pure.

    1  changed files of tests
    2  the mirrors of changed modules (the rule of tests/test_mirror.py), and tests that name another changed file
    3  tests that import a changed module, and the mirrors of the modules that do

Only those of 3 that `./check` runs. The cheapest of a row come first, until they take BUDGET_S; the others are
left to `./check`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache

from tests.tiers import tier_of

AREAS = {
    "tests/frontend": "services/frontend",
    "tests/worker": "services/worker",
    "tests/router": "services/router",
    "tests/kvbm": "services/kvbm",
    "tests/virtual": "services/virtual",
    "tests/shared": "shared",
    "tests/deploy": "deploy/local",
}
"""Folders of tests, and the folders of the modules that they test."""
MORE_AREAS = {"tests/monitoring": "deploy/monitoring", "tests/benchmarks": "benchmarks", "tests": "tests"}
"""The same, but here a file of tests need not have the name of a module."""
BUDGET_S = 45.0
"""Seconds that the tests may take; the rest of a minute is for lint and types."""
SEEDS = "tests/simulation/test_seeds.py"
"""Runs after a change of any product module."""
PRODUCT = ("services/", "shared/")


def is_test(file: str) -> bool:
    """Whether a path is that of a file of tests."""
    return file.startswith("tests/") and file.rpartition("/")[2].startswith("test_") and file.endswith(".py")


def mirror_of(module: str) -> str:
    """Return where the tests of a module would be; `__main__.py` is tested by `test_main.py`."""
    folder, _, name = module.rpartition("/")
    for tests, code in (AREAS | MORE_AREAS).items():
        if f"{folder}/".startswith(f"{code}/"):
            return f"{tests}{folder.removeprefix(code)}/test_{name.removesuffix('.py').strip('_')}.py"
    return ""


def imports_of(text: str) -> Iterator[str]:
    """Yield the names of the modules that a module imports; of `from a import b` both `a` and `a.b`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def importers(files: Iterable[str], texts: Mapping[str, str]) -> list[str]:
    """Return the modules that import one of these directly."""
    names = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files}
    last = {name.rpartition(".")[2] for name in names}
    parsed = cache(lambda file: set(imports_of(texts[file])))  # few texts have the word at all
    return [file for file, text in texts.items() if any(word in text for word in last) and names & parsed(file)]


def rows(changed: Collection[str], texts: Mapping[str, str]) -> list[list[str]]:
    """Return the tests' files in three rows as above, given the text of every Python file that is there."""
    tests = [file for file in texts if is_test(file)]
    modules = [file for file in changed if file.endswith(".py") and not is_test(file)]
    others = [file.rpartition("/")[2] for file in changed if not file.endswith(".py")]
    named = {f'{before}{name}"' for name in others for before in ('"', "/")}
    by_import = importers(modules, texts) if modules else []
    in_check = {file for file in tests if tier_of(file) == "check"}
    first = {file for file in changed if file in texts and is_test(file)}
    second = set(tests).intersection(map(mirror_of, modules)) | {
        file for file in in_check if any(name in texts[file] for name in named)
    }
    if any(file.startswith(PRODUCT) for file in modules):
        second |= in_check.intersection([SEEDS])
    third = in_check.intersection([*by_import, *map(mirror_of, by_import)])
    return [sorted(first), sorted(second - first), sorted(third - second - first)]


def within_budget(
    rows: Iterable[Iterable[str]], cost_s: Callable[[str], float], budget_s: float = BUDGET_S
) -> tuple[list[str], list[str]]:
    """Return the files that fit into the budget, and those that are left out."""
    run: list[str] = []
    left_out: list[str] = []
    for row in rows:
        for file in sorted(row, key=cost_s):
            fits = sum(map(cost_s, run)) + cost_s(file) <= budget_s
            (run if fits else left_out).append(file)
    return run, left_out
