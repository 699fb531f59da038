from __future__ import annotations

from random import Random

from services.frontend.requests.actions import CountLoss, DispatchAttempt, Fail, Finish, PublishLoad, SelectWorker
from services.frontend.requests.attempt_spans import AttemptSpans
from shared.errors import Unavailable
from shared.messages.select import Overlap, Prefilled, Selected, SelectRefused
from shared.tracing.spans import SpanIds, SpanRecord
from shared.tracing.traceparent import TraceParent, carried

ROOT = TraceParent("1" * 32, "2" * 16)
FIRST_TOKEN = PublishLoad(Prefilled("r", 1, 0))


def begun() -> tuple[AttemptSpans, list[SpanRecord]]:
    spans: list[SpanRecord] = []
    return AttemptSpans(ROOT, "r", SpanIds(Random(1)), spans.append), spans


def selected(attempt: int, instance: str) -> Selected:
    return Selected("r", attempt, instance, 3, "router", Overlap(4, 2, 1), "why")


def test_a_choice_says_where_and_how_many_tokens_it_found() -> None:
    spans, ended = begun()
    spans.acted(SelectWorker(1, 0, ()), 10)
    assert carried(spans.select_headers or {}) is not None
    spans.chosen(selected(1, "w1"), 16, 20)
    assert spans.select_headers is None
    [select] = ended
    assert (select.name, select.start_ns, select.end_ns, select.kind) == ("select", 10, 20, "client")
    assert select.attributes["headrace.instance"] == "w1"
    assert select.attributes["headrace.rank"] == 3
    assert select.attributes["headrace.overlap_tokens"] == 7 * 16
    assert select.attributes["headrace.overlap_tokens.host"] == 32


def test_a_migration_lasts_from_the_first_loss_to_the_next_token() -> None:
    spans, ended = begun()
    for attempt, at in ((1, 10), (2, 30), (3, 50)):
        spans.acted(SelectWorker(attempt, 0, ()), at)
        spans.chosen(selected(attempt, f"w{attempt}"), 16, at + 1)
        spans.acted(DispatchAttempt(attempt, f"w{attempt}", 0), at + 1)
        spans.validate()
        if attempt < 3:
            spans.acted(CountLoss("gone", had_tokens=attempt == 1, attempt=attempt, why="it is gone"), at + 5)
    assert carried(spans.attempt_headers or {}) is not None
    spans.acted(FIRST_TOKEN, 60)
    spans.acted(Finish("stop"), 70)
    assert spans.attempt_headers is None
    attempts = [span for span in ended if span.name == "attempt"]
    assert [(span.start_ns, span.end_ns) for span in attempts] == [(10, 15), (30, 35), (50, 70)]
    [migration] = [span for span in ended if span.name == "migration"]
    assert (migration.start_ns, migration.end_ns) == (15, 60)
    assert migration.attributes["headrace.lost_instance"] == "w1"
    assert migration.attributes["headrace.instance"] == "w3"
    assert {span.parent for span in (*attempts, migration)} == {ROOT.span}


def test_a_question_that_is_asked_again_has_two_spans_in_one_attempt() -> None:
    spans, ended = begun()
    spans.acted(SelectWorker(1, 0, ()), 10)
    spans.chosen(SelectRefused("r", 1, "no_instances", "none"), 0, 20)
    spans.acted(SelectWorker(1, 0, ()), 30)
    spans.unrouted("no router answered", 40)
    spans.acted(Fail(Unavailable("no worker")), 50)
    assert [span.name for span in ended] == ["select", "select", "attempt"]
    assert [span.error for span in ended] == ["no_instances: none", "no router answered", "no worker"]
    assert {span.parent for span in ended[:2]} == {ended[2].span}


def test_the_end_ends_everything_once() -> None:
    spans, ended = begun()
    spans.acted(SelectWorker(1, 0, ()), 10)
    spans.acted(CountLoss("gone", had_tokens=False, attempt=1, why="it is gone"), 20)
    spans.acted(SelectWorker(2, 0, ()), 30)
    spans.close(40, "the client has left")
    spans.close(50)
    assert sorted(span.name for span in ended) == ["attempt", "attempt", "migration", "select", "select"]
    assert all(span.end_ns <= 40 for span in ended)
