"""deploy/local/docs.py: every document can be printed by its topic, and an unknown topic is one line
that names the documents on that subject."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local import cli
from deploy.local.docs import SUBJECTS, documents_about, listing, text_of, topics
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
        ("ollamaa", "error: docs ollamaa: no such document; did you mean ollama"),
        ("../../etc/passwd", "error: docs ../../etc/passwd: no such document; "),
        ("zebra", "error: docs zebra: no such document; `./headrace docs` lists them"),
        ("zzzz", "error: docs zzzz: no such document; `./headrace docs` lists them"),
    ],
)
def test_an_unknown_topic_is_one_line_with_the_nearest(
    topic: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["docs", topic]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("subject", "document"),
    [
        ("scaling", "scale"),
        ("autoscaling", "autoscale"),
        ("eviction", "kvbm (Eviction policies)"),
        ("TLS", "access"),
        ("envoy", "picker"),
        ("gpus", "gpu (Run workers on NVIDIA GPUs)"),
        ("a GGUF file", "model_files"),
    ],
)
def test_a_subject_names_the_documents_on_it(subject: str, document: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs", *subject.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: docs {subject}: no such document; it is a subject of ")
    assert f" {document}" in line


def test_titles_come_before_headings_before_tasks_and_decisions_last() -> None:
    texts = {
        "decisions/0001": "# Pools\n",
        "docs": "# Index\n\n| I want to … | read |\n| --- | --- |\n| fill pools | [c.md](c.md#here) |\n",
        "b": "# B\n\n## A pool\n\n```\n# pool in code\n```\n",
        "c": "# C\n",
        "pool": "# The others\n",
        "d": "# D\n\npools\n",
    }
    assert documents_about("pools", texts) == {
        "pool": "The others",
        "b": "A pool",
        "c": "fill pools",
        "decisions/0001": "Pools",
    }
    assert documents_about("of the", texts) == {}
    assert len(documents_about("pool", {f"pool-{number}": "# P\n" for number in range(SUBJECTS + 1)})) == SUBJECTS


def test_a_word_that_no_heading_has_names_the_documents_that_mention_it(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name, text in (("a", "# A\n\nMarmots.\n"), ("b", "# B\n\nmarmot\n\na marmot\n"), ("c", "# C\n")):
        (tmp_path / "docs" / f"{name}.md").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"docs marmots: no such document; it is mentioned in b, a$"):
        text_of("marmots", tmp_path)


@pytest.mark.parametrize("topic", ["examples/README.md", "examples", "examples/laptop/README.md", "examples/laptop"])
def test_the_examples_are_documents(topic: str) -> None:
    name = topic.removesuffix("/README.md")
    assert text_of(topic) == (ROOT / name / "README.md").read_text(encoding="utf-8")


def test_an_installation_without_documents_says_where_they_are(tmp_path: Path) -> None:
    for ask in (topics, listing):
        with pytest.raises(ConfigError, match="the documents are in the checkout and the package, and not here"):
            ask(tmp_path)
