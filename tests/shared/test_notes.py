"""NoteLog: what happened lately."""

from __future__ import annotations

import pytest

from shared.errors import ProtocolError
from shared.messages.control import Note
from shared.notes import NOTES_IN_ANSWER, REQUEST_NOTES, TEXT_CHARS, NoteLog, ProcessNotes, block_name


def test_notes_are_found_by_what_they_are_about_with_their_age() -> None:
    log: NoteLog[bytes] = NoteLog(10)
    log.add(b"\x01\x02", "evicted for {}", 5.0, name="request r")
    log.add(b"\x03", "stored", 6.0)
    log.add(b"\x01\x02", "stored", 7.0)
    assert log.find(lambda key: key.endswith(b"\x02"), 8.0) == [
        Note("0102", 3.0, "evicted for request r"),
        Note("0102", 1.0, "stored"),
    ]


def test_the_oldest_note_is_forgotten_at_the_limit_and_an_answer_has_the_latest() -> None:
    log: NoteLog[str] = NoteLog(2 * NOTES_IN_ANSWER)
    for number in range(3 * NOTES_IN_ANSWER):
        log.add("r", f"note {number}", float(number))
    assert len(log) == 2 * NOTES_IN_ANSWER
    found = log.find(lambda _: True, 1000.0)
    assert len(found) == NOTES_IN_ANSWER
    assert found[-1].text == f"note {3 * NOTES_IN_ANSWER - 1}"


def test_a_hostile_text_is_cut_and_cannot_control_a_terminal() -> None:
    log: NoteLog[str] = NoteLog(1)
    log.add("r", "\x1b[2J\n" + 1000 * "x{}", 0.0)
    (note,) = log.find(lambda _: True, 0.0)
    assert note.text.isprintable()
    assert len(note.text) == TEXT_CHARS


def test_a_process_finds_notes_by_the_id_of_an_answer() -> None:
    notes = ProcessNotes()
    for number in range(REQUEST_NOTES + 1):
        notes.requests.add(f"r{number}", "lost", 1.0, attempt=2)
    assert notes.find_request("chatcmpl-r7", 3.0) == [Note("r7", 2.0, "lost", 2)]
    assert notes.find_request("r0", 3.0) == []
    assert len(notes.find_request("", 3.0)) == NOTES_IN_ANSWER


@pytest.mark.parametrize("name", ["", "xyz", 15 * "a", 17 * "a", 33 * "a", 16 * "g", "a b" * 100])
def test_a_block_is_named_by_16_or_32_digits(name: str) -> None:
    with pytest.raises(ProtocolError, match="16 hex digits"):
        block_name(name)
    assert block_name("00FF" * 4) == b"\x00\xff" * 4
    assert len(block_name(32 * "a")) == 16
