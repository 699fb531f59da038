"""deploy/local/keys_file.py: a keys file is changed in one place, and the frontend reads it."""

from __future__ import annotations

import json

import pytest

from deploy.local.keys_file import add_entry, remove_entry
from shared import api_keys
from shared.errors import ConfigError

ONE, TWO, THREE = ("0" * 64, "1" * 64, "2" * 64)
COMMENTED = f"""\
# keys of the team
alice = {{ sha256 = "{ONE}", concurrency = 3 }}  # until May

# keys of machines
"bob" = {{ sha256 = "{TWO}" }}
"""
TABLES = f"""\
# first
[alice]
sha256 = "{ONE}"
concurrency = 3  # few

# second
[ "bob" ]
sha256 = "{TWO}"
"""
DOTTED = f'alice.sha256 = "{ONE}"\nalice.concurrency = 3\nbob.sha256 = "{TWO}"'
JSON = json.dumps({"alice": {"sha256": ONE, "concurrency": 3}, "bob": {"sha256": TWO}})


def parsed(text: str) -> dict[str, object]:
    return api_keys.parse_keys(text.encode())


@pytest.mark.parametrize("text", [COMMENTED, TABLES, DOTTED, JSON, COMMENTED.replace("\n", "\r\n")])
def test_an_entry_comes_and_goes_in_every_form(text: str) -> None:
    more = add_entry(text, "carol", {"sha256": THREE, "requests_per_minute": 5})
    read = api_keys.read_keys(more.encode())
    assert list(read) == ["alice", "bob", "carol"]
    assert read["carol"].requests_per_minute == 5
    assert parsed(remove_entry(more, "carol")) == parsed(text)
    fewer = remove_entry(more, "alice")
    assert list(api_keys.read_keys(fewer.encode())) == ["bob", "carol"]
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in fewer.splitlines() if line.startswith("#")
    ]


def test_the_first_entry_makes_the_file() -> None:
    text = add_entry("", "alice", {"sha256": ONE})
    assert text == f'alice = {{ sha256 = "{ONE}" }}\n'
    assert remove_entry(text, "alice") == ""


def test_names_that_are_part_of_others_stay() -> None:
    text = f'alice = {{ sha256 = "{ONE}" }}\nalice-2 = {{ sha256 = "{TWO}" }}\n'
    assert list(parsed(remove_entry(text, "alice"))) == ["alice-2"]


@pytest.mark.parametrize("text", ["alice = 1\n", "alice = {", "[1", '{"a": 1}', "[" * 100_000, "{" * 100_000])
def test_what_is_no_keys_file_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        add_entry(text, "bob", {"sha256": ONE})


def test_a_name_that_is_there_or_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="alice: this name is there already"):
        add_entry(COMMENTED, "alice", {"sha256": THREE})
    with pytest.raises(ConfigError, match=r"alise: no such name in the file; did you mean alice\?"):
        remove_entry(COMMENTED, "alise")


def test_a_file_that_lines_cannot_change_is_refused_and_not_written_wrongly() -> None:
    text = f'"ali\\u0063e" = {{ sha256 = "{ONE}" }}\n'
    assert list(parsed(text)) == ["alice"]
    with pytest.raises(ConfigError, match="edit it by hand"):
        remove_entry(text, "alice")


def test_a_full_file_is_refused_because_a_frontend_would_refuse_it() -> None:
    text = "".join(f'k{number} = {{ sha256 = "{number:064x}" }}\n' for number in range(api_keys.KEYS_LIMIT))
    with pytest.raises(ConfigError, match="at most 1000"):
        add_entry(text, "one-more", {"sha256": ONE})
