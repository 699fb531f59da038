"""What is noted of attempts at a worker."""

from __future__ import annotations

from services.worker.contracts.messages import Begun
from services.worker.requests import attempt_notes
from shared.messages.frames import Part
from shared.messages.generate import Refused


def test_the_note_of_a_first_token_says_for_what_the_attempt_waited() -> None:
    assert attempt_notes.begun(Begun(7, 0.0, 0.02)) == "waited 0 ms for its first step, then 20 ms to its first token"
    waited = Begun(7, 1.5, 0.02, 0.3, (1.1, 0.0, 0.0), b"\xab" * 16)
    assert attempt_notes.begun(waited) == (
        "waited 1.50 s (1.10 s for free blocks) for its first step, 300 ms of it for blocks of the kvbm, then 20 ms to"
        " its first token; the first block that no cache had: " + 16 * "ab"
    )


def test_the_note_says_how_many_shorter_prompts_were_computed_first() -> None:
    assert "for its first step, overtaken by 3 that were due earlier, then" in attempt_notes.begun(
        Begun(7, 1.5, 0.02, overtaken=3)
    )


def test_only_answers_that_are_not_complete_have_a_note_of_their_end() -> None:
    for finish in ("stop", "length", None):
        assert attempt_notes.ended(Part("r", 1, 5, b"", finish)) == ""
    failed = Part("r", 1, 5, b"", "error", error="lost")
    assert attempt_notes.ended(failed) == "ended with an error after 5 tokens: lost"
    assert "the time of its request" in attempt_notes.ended(Part("r", 1, 5, b"", "deadline"))
    assert "cancelled after 5 tokens" in attempt_notes.ended(Part("r", 1, 5, b"", "cancelled"))


def test_a_refusal_has_its_code_and_reason() -> None:
    assert attempt_notes.refused(Refused("r", 1, "overloaded", "12 wait")) == "refused (overloaded): 12 wait"
