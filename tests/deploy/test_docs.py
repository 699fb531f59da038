"""deploy/local/docs.py: every document can be printed by its topic, and an unknown topic is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local import cli
from deploy.local.docs import listing, text_of, topics
from shared.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_topic_every_document_is_listed_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["TOPIC"] == "DOCUMENT"
    assert rows["gpu"] == "Run workers on NVIDIA GPUs"
    assert {file.stem for file in (ROOT / "docs").glob("*.md")} - {"README"} <= rows.keys()
    assert {"readme", "docs", "decisions", "benchmarks", "deploy/compose", "architecture"} <= rows.keys()


@pytest.mark.parametrize("topic", ["limits", "LIMITS.md", "docs/limits.md#what-a-refusal-means", "../docs/limits.md"])
def test_a_topic_or_a_link_prints_the_document_as_it_is(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs", topic]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")


def test_a_readme_is_named_by_its_directory() -> None:
    assert text_of("decisions") == (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    assert text_of("docs/README.md") == text_of("docs") != text_of("README.md") == text_of("readme")


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("gpus", "error: docs gpus: no such document; did you mean gpu"),
        ("../../etc/passwd", "error: docs ../../etc/passwd: no such document; "),
        ("zzzz", "error: docs zzzz: no such document; `./headrace docs` lists them"),
    ],
)
def test_an_unknown_topic_is_one_line_with_the_nearest(
    topic: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["docs", topic]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_an_installation_without_documents_says_where_they_are(tmp_path: Path) -> None:
    for ask in (topics, listing):
        with pytest.raises(ConfigError, match="the documents are in the checkout and the package, and not here"):
            ask(tmp_path)
