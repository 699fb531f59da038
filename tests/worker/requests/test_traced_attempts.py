from __future__ import annotations

from random import Random

from services.worker.contracts.messages import Begun
from services.worker.requests.traced_attempts import TracedAttempts
from shared.hashing import pack_tokens
from shared.messages.frames import FinishReason, Part
from shared.tracing.spans import SpanIds
from shared.tracing.traceparent import TraceParent

PARENT = TraceParent("1" * 32, "2" * 16)
NAME = ("r", 2)
S = 1_000_000_000


def accepted() -> TracedAttempts:
    attempts = TracedAttempts(SpanIds(Random(1)))
    attempts.accepted(NAME, 7, PARENT, 100 * S)
    return attempts


def part(first: int, tokens: int, finish: FinishReason | None = None, error: str = "") -> Part:
    return Part(*NAME, first, pack_tokens(range(tokens)), finish, 48, None, error, 32, 16)


def test_queue_onboard_and_prefill_follow_one_another_up_to_the_first_token() -> None:
    attempts = accepted()
    attempts.begun(Begun(7, queued_s=7.0, prefill_s=3.0, onboard_s=2.0))
    spans = attempts.part(part(5, 1), 110 * S)
    assert [(span.name, span.start_ns // S, span.end_ns // S) for span in spans] == [
        ("queue", 100, 105),
        ("onboard", 105, 107),
        ("prefill", 107, 110),
    ]
    assert {(span.trace, span.parent) for span in spans} == {(PARENT.trace, PARENT.span)}
    assert spans[-1].attributes["headrace.cached_tokens.host"] == 32
    [decode] = attempts.part(part(9, 1, "length"), 120 * S)
    assert (decode.name, decode.start_ns // S, decode.end_ns // S) == ("decode", 110, 120)
    assert decode.attributes["headrace.tokens"] == 5
    assert len(attempts) == 0
    attempts.validate()


def test_times_longer_than_the_attempt_are_cut_at_its_acceptance() -> None:
    attempts = accepted()
    attempts.begun(Begun(7, queued_s=1.0, prefill_s=300.0))
    spans = attempts.part(part(0, 1), 110 * S)
    assert [(span.name, span.start_ns // S, span.end_ns // S) for span in spans] == [
        ("queue", 100, 100),
        ("prefill", 100, 110),
    ]


def test_an_engine_without_times_leaves_one_span_that_says_so() -> None:
    [prefill] = accepted().part(part(0, 1), 110 * S)
    assert (prefill.name, prefill.start_ns // S) == ("prefill", 100)
    assert prefill.attributes["headrace.with_queue"] is True


def test_an_answer_of_one_token_has_all_of_them() -> None:
    attempts = accepted()
    attempts.begun(Begun(7, queued_s=7.0, prefill_s=3.0))
    assert [span.name for span in attempts.part(part(0, 1, "stop"), 110 * S)] == ["queue", "prefill", "decode"]
    assert len(attempts) == 0


def test_an_attempt_that_never_began_has_a_queue_that_failed() -> None:
    attempts = accepted()
    [queue] = attempts.part(part(0, 0, "error", "the engine was lost"), 110 * S)
    assert (queue.name, queue.error, queue.end_ns // S) == ("queue", "the engine was lost", 110)
    assert len(attempts) == 0


def test_parts_and_times_of_attempts_that_are_not_traced_change_nothing() -> None:
    attempts = accepted()
    attempts.begun(Begun(8, 1.0, 1.0))
    assert attempts.part(Part("other", 1, 0, b"", "stop"), 110 * S) == []
    assert len(attempts) == 1
    attempts.validate()
