"""tests/language.py: the tree keeps the mechanical rules for plain English, and the rules find what breaks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.language import docstring, findings, in_code, words


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
