"""docs/where.md, from the docstrings of all modules: `python -m tests.where_page` writes it."""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "where.md"
TOPS = ("services", "shared", "deploy")


def written(page: str) -> str:
    """The page with its sections made from the docstrings. Paragraphs before the first section stay as they are."""
    modules = [
        path
        for top in TOPS
        for path in sorted((ROOT / top).rglob("*.py"), key=lambda path: (path.parent.parts, path.name))
    ]
    sections = [_section(package, list(files)) for package, files in groupby(modules, key=lambda path: path.parent)]
    return page[: page.index("## ")] + "\n".join(filter(None, sections))


def _section(package: Path, files: list[Path]) -> str:
    rows = [f"- `{_short(path)}`: {_first_sentence(path)}\n" for path in files if path.name != "__init__.py"]
    if not rows:
        return ""
    role = _first_sentence(package / "__init__.py")
    return f"## `{_short(package)}/`\n\n{role}\n\n{''.join(rows)}".replace("\n\n\n\n", "\n\n")


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)).removeprefix("services/")


def _first_sentence(path: Path) -> str:
    if not path.exists():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    words = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", words, maxsplit=1)[0]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
