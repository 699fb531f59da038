"""This version's messages next to those of the last release: each reads what the other writes, and keeps all of it.

The last release's messages were recorded, for clones without its commit. Whole services of both run next to each
other in tests/integration/test_two_versions.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests import last_release, wire_messages

RENAMED = {
    "services.worker.sharing.messages.TO_LENDER": "TO_SHARER",
    "services.worker.sharing.messages.FROM_LENDER": "FROM_SHARER",
}
"""Codecs of the last release that have another name in this tree."""
NEWER = {name: old for old, name in RENAMED.items()}
LEFT_OUT = {
    "instance: Invalid enum value 'turns' - at `$.service`",
    "instance: Invalid enum value 'encode' - at `$.role`",
    "model card: Invalid enum value 'encode' - at `$.role`",
}
"""What the last release logs of entries that only `up --models` and workers with the role encode make. It leaves them
out, so it chooses no such worker."""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = last_release.tree(tmp_path_factory.mktemp("last_release"))
    if tree is None:
        pytest.skip(f"this clone has no commit {last_release.COMMIT}")
    return tree


def kept(theirs: Any, ours: Any) -> bool:
    """Return whether all of a message is in what another version made of it; that may know more fields."""
    match theirs, ours:
        case dict(), dict():
            return all(name in ours and kept(value, ours[name]) for name, value in theirs.items())
        case list(), list():
            return len(theirs) <= len(ours) and all(map(kept, theirs, ours))
        case _:
            return bool(theirs == ours)


def test_this_version_reads_each_message_of_the_last_release_and_keeps_all_of_it() -> None:
    recorded = [(module, RENAMED.get(f"{module}.{name}", name), text) for module, name, text in last_release.recorded()]
    assert len(recorded) > 100
    for message, (text, failed) in zip(recorded, wire_messages.read(recorded), strict=True):
        assert not failed, (message, failed)
        theirs, ours = (msgspec.msgpack.decode(bytes.fromhex(each)) for each in (message[2], text))
        assert kept(theirs, ours), (message[:2], theirs, ours)


def test_the_messages_of_the_last_release_are_recorded(old: Path) -> None:
    assert last_release.RECORDED.read_text(encoding="utf-8") == last_release.record(old)


def test_the_last_release_reads_each_message_of_this_version(old: Path) -> None:
    known = {(module, name) for module, name, _ in last_release.recorded()}
    asked = [
        (module, NEWER.get(name, f"{module}.{name}").rpartition(".")[2], text)
        for module, name, text in wire_messages.write()
    ]
    asked = [message for message in asked if message[:2] in known]
    assert len(asked) > 100
    answers = last_release.messages(old, "read", json.dumps(asked))
    failures = [(message, failed) for message, (_, failed) in zip(asked, answers, strict=True) if failed]
    assert [each for each in failures if each[1] not in LEFT_OUT] == []


@pytest.mark.parametrize(
    "codec", [pytest.param(codec, id=f"{module}.{name}") for module, name, codec in wire_messages.codecs()]
)
def test_a_field_of_a_later_version_is_ignored_wherever_it_stands(codec: Any) -> None:
    for now, later in zip(wire_messages.examples(codec), wire_messages.examples(codec, later=True), strict=True):
        assert codec.decode(later) == codec.decode(now)


def test_a_message_that_lost_a_field_or_its_value_is_not_kept() -> None:
    assert kept({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2, "c": 3}, 4]})
    assert not kept({"a": 1}, {"b": 1})
    assert not kept([1, 2], [1])
    assert not kept({"a": [{"b": 2}]}, {"a": [{"b": 3}]})
