"""Every path and module that a document names exists; links lead to files; what is made of the code is up to date."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.version import VERSION
from tests import llms_page, where_page

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")),
        *({*(ROOT / "docs").glob("*.md")} - {where_page.PAGE}),
        *(ROOT / "docs" / "decisions").glob("*.md"),
        ROOT / "deploy" / "compose" / "README.md",
        ROOT / "benchmarks" / "README.md",
        *(ROOT / "examples").glob("**/README.md"),
    ]
)
ABOVE = (ROOT, ROOT / "services", ROOT / "benchmarks")
"""Directories that a path in a document may begin in, in addition to the document's own."""
PATH = re.compile(r"(?:shared|services|deploy|tests|benchmarks|docs|frontend|router|worker|kvbm)/[\w./-]*")
FILE = re.compile(r"[\w/-]+\.py")
MODULE = re.compile(r"(?:-m |^)((?:shared|services|deploy|tests|benchmarks)(?:\.[a-z]\w*)+)")


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_table_has_a_head(document: Path) -> None:
    """A row after an empty line begins another table, and is shown as text if a head is missing."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert [table for table in tables if not re.match(r".*\n\|(?: ?:?-+:? ?\|)+\n", table)] == []


def headings(document: Path) -> set[str]:
    """Their anchors, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_where_is_what_its_program_writes() -> None:
    page = where_page.PAGE.read_text(encoding="utf-8")
    assert where_page.written(page) == page, "run `python -m tests.where_page`"


def test_llms_txt_is_what_its_program_writes_and_has_every_document() -> None:
    page = llms_page.PAGE.read_text(encoding="utf-8")
    assert llms_page.written() == page, "run `python -m tests.llms_page`"
    linked = set(re.findall(r"\]\((docs/\w[\w-]*\.md)\)", page))
    assert linked == {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")} - {"docs/README.md"}


def test_the_readme_says_how_large_the_core_and_the_whole_are() -> None:
    architecture = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    path = re.search(r"^## A reader's path$(.*?)^5\. ", architecture, re.M | re.S)
    said = re.search(r"core path \(([\d,]+) of ([\d,]+) lines\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert path
    assert said
    core = [ROOT / name if (ROOT / name).exists() else ROOT / "services" / name for name in paths(path[1])]
    core = [each for each in core if each.suffix != ".md"]
    whole = [ROOT / top for top in where_page.TOPS]
    for places, number in zip((core, whole), said.groups(), strict=True):
        lines = sum(len(file.read_bytes().splitlines()) for place in places for file in files(place))
        assert lines == pytest.approx(int(number.replace(",", "")), rel=0.05)


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+) \(", text, re.M)[0] == VERSION


DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_is_short_and_a_module_names_it(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 60
    assert f"decisions/{page.name[:4]}" in CODE


CODE = "\n".join(
    file.read_text(encoding="utf-8")
    for top in (*where_page.TOPS, "tests")
    for pattern in ("*.py", "*.sh")
    for file in sorted((ROOT / top).rglob(pattern))
    if file != Path(__file__)
)


NOT_RUN = re.compile(
    r"(was|were|been) (not|never) (run|tried)|(not|never) been (run|tried)|\*\*[Nn]ot run|not (there|here) yet|untested"
)


@pytest.mark.parametrize(
    "document",
    [each for each in DOCUMENTS if "decisions" not in each.parts],
    ids=lambda each: str(each.relative_to(ROOT)),
)
def test_what_is_not_there_or_was_not_run_stands_in_the_readmes_list_alone(document: Path) -> None:
    if document in (ROOT / "README.md", ROOT / "benchmarks" / "README.md"):
        return
    text = re.sub(
        r"\[README\]\(.*?what-was-not-run\) says what .*?\.(\s|$)", "", document.read_text(encoding="utf-8"), flags=re.S
    )
    assert [line for line in text.splitlines() if NOT_RUN.search(line)] == []


def test_upgrade_compares_every_lock_file() -> None:
    compared = re.search(r"git diff --stat HEAD origin/main -- '(\S+)'", (ROOT / "docs" / "upgrade.md").read_text())
    assert compared
    assert set(ROOT.glob(compared[1])) == set(ROOT.glob("[!.]*.lock"))


def files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def test_the_glossary_is_in_alphabetical_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = [term.lower() for term in re.findall(r"^\| \*\*(.+?)\*\*", text, re.MULTILINE)]
    assert len(terms) >= 40
    assert terms == sorted(terms)


def test_the_index_has_every_document() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in names if f"]({name}" not in text} == set()


def test_every_document_is_two_links_from_the_readme() -> None:
    readme = ROOT / "README.md"
    first = linked_documents(readme)
    assert ROOT / "docs" / "README.md" in first
    reached = {readme, *first}.union(*map(linked_documents, first))
    assert [str(document.relative_to(ROOT)) for document in DOCUMENTS if document not in reached] == []


def linked_documents(document: Path) -> set[Path]:
    """The Markdown files that a document links to; a link to a directory is one to its README."""
    targets = [document.parent / link for link in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8"))]
    files = [(target / "README.md" if target.is_dir() else target).resolve() for target in targets]
    return {file for file in files if file.suffix == ".md" and file.is_file()}
