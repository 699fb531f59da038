"""tests/language.py: the tree keeps the mechanical rules for plain English, and the rules find what breaks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.language import docstring, findings, grammar, in_code, in_document, words


def test_the_tree_keeps_the_rules() -> None:
    assert [str(finding) for finding in findings()] == []


@pytest.mark.parametrize(
    "text",
    ["The key is read anew.", "It stands beside the pool.", "Nobody asks.", "Clients are told so.", "a value as such"],
)
def test_a_forbidden_word_is_found(text: str) -> None:
    assert list(words(text))


@pytest.mark.parametrize(
    "text", ["a frontend behind a proxy", "it leaves nothing behind", "they can be told apart", "the option `beside`"]
)
def test_idioms_and_code_are_allowed(text: str) -> None:
    assert not list(words(text))


@pytest.mark.parametrize(
    "text",
    [
        "Of each choice.",
        "As in Reply.",
        "One run.",
        "Numbers that workers answer with …",
        "… and those that are left of them.",
        "This sentence goes on and on " + "and on " * 20 + "until it has more words than anyone reads at once.",
    ],
)
def test_a_docstring_that_does_not_stand_by_itself_is_found(text: str) -> None:
    assert list(docstring(text))


@pytest.mark.parametrize(
    "text",
    [
        "The reason of the refusal; empty: none.",
        "None: it runs.",
        "Seconds that it waits. 0: no limit.",
        "Return the slot. Raise PoolUnfit where it is too small.",
        "Raise OSError (ENOSPC), Unavailable\n    where it does not answer.",
        "The load of each rank; empty where the sums say it all.",
        "It tries again where there is too little.",
        "The newest comes first. Of two records with one key the newer counts.",
        "So long do other answers stand still.",
    ],
)
def test_a_sentence_of_another_order_is_found(text: str) -> None:
    assert list(grammar(text))


@pytest.mark.parametrize(
    "text",
    [
        "The reason of the refusal. Empty if there is none.",
        "Return where the blocks lie. Raise PeerFault.",
        "`where` names the file; `empty: x` is its content.",
        "The value 0: the first one of a list is meant.",
        "blobs/DIGEST    None: a column of a table. Of no interest.",
        "Of these models, one was run.",
    ],
)
def test_places_code_tables_and_usual_sentences_are_allowed(text: str) -> None:
    assert not list(grammar(text))


def test_a_documents_finding_names_the_line_of_its_sentence(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("# Title\n\nA first line.\nA key; empty: no key is needed.\n\n```\nx; empty: y\n```\n")
    assert [(finding.line, finding.rule) for finding in in_document(file, tmp_path)] == [(4, "grammar")]


def test_a_picture_may_be_as_long_as_it_has_to_be() -> None:
    assert not list(docstring("Returns the state.\n\n    " + "idle ──▶ busy " * 30))


def test_findings_name_the_file_the_line_and_the_rule(tmp_path: Path) -> None:
    file = tmp_path / "services" / "x.py"
    file.parent.mkdir()
    file.write_text(
        '"""Serves requests to it."""\n\n\ndef test_nobody_asks() -> None:\n    raise ValueError("ask anew")\n'
    )
    found = [(finding.line, finding.rule) for finding in in_code(file, tmp_path)]
    assert sorted(found) == [(4, "test name"), (5, "string")]
