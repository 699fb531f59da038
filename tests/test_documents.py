"""Every path and module that a document names exists, so that ARCHITECTURE.md stays a map; links lead to files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "decisions").glob("*.md"),
        ROOT / "deploy" / "compose" / "README.md",
        ROOT / "benchmarks" / "README.md",
    ]
)
ABOVE = (ROOT, ROOT / "services", ROOT / "benchmarks")
"""Directories that a path in a document may begin in, in addition to the document's own."""
PATH = re.compile(r"(?:shared|services|deploy|tests|benchmarks|docs|frontend|router|worker|kvbm)/[\w./-]*")
FILE = re.compile(r"[\w/-]+\.py")
MODULE = re.compile(r"(?:-m |^)((?:shared|services|deploy|tests|benchmarks)(?:\.[a-z]\w*)+)")
PACKAGES = [each.parent for top in ("services", "shared", "deploy") for each in (ROOT / top).rglob("__init__.py")]


def paths(text: str) -> Iterator[str]:
    """Paths in `text`, of code in backticks."""
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        if PATH.fullmatch(code) or FILE.fullmatch(code):
            yield code


def modules(text: str) -> Iterator[str]:
    """Modules that commands in `text` run, or code names."""
    for code in [*re.findall(r"`([^`\n]+)`", text), *text.splitlines()]:
        yield from (found.rstrip(".") for found in MODULE.findall(code))


def exists(path: str, document: Path) -> bool:
    return any((above / path).exists() for above in (*ABOVE, document.parent))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_path_in_a_document_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert [path for path in paths(text) if not exists(path, document)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_module_in_a_document_exists(document: Path) -> None:
    missing = []
    for module in modules(document.read_text(encoding="utf-8")):
        path = ROOT.joinpath(*module.split("."))
        if not (path.is_dir() or path.with_suffix(".py").is_file() or path.parent.with_suffix(".py").is_file()):
            missing.append(module)
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (heading and heading not in headings(target)):
            missing.append(link)
    assert missing == []


def headings(document: Path) -> set[str]:
    """Their anchors, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_map_names_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE))
    outermost = {"services", "deploy", "services/frontend", "services/router", "services/worker", "services/kvbm"}
    packages = {str(package.relative_to(ROOT)) for package in PACKAGES} - outermost
    assert {package.removeprefix("services/") for package in packages} <= rows


def test_the_glossary_is_in_alphabetical_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = [term.lower() for term in re.findall(r"^\| \*\*(.+?)\*\*", text, re.MULTILINE)]
    assert len(terms) >= 40
    assert terms == sorted(terms)


def test_the_index_has_every_document() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in names if f"]({name}" not in text} == set()
