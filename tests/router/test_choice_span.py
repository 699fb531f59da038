from __future__ import annotations

from random import Random

from services.router.choice_span import choice_span
from shared.messages.select import Overlap, Select, Selected, SelectRefused
from shared.tracing.spans import SpanIds
from shared.tracing.traceparent import TraceParent

PARENT = TraceParent("1" * 32, "2" * 16)
ASKED = Select("r", 1, "f1", "m", b"", 100, 10)


def test_a_choice_names_the_worker_and_a_refusal_its_reason() -> None:
    ids = SpanIds(Random(1))
    chosen = choice_span(ids, PARENT, ASKED, Selected("r", 1, "w1", 2, "r1", Overlap(1, 2, 3), "why"), 16, 5, 9)
    refused = choice_span(ids, PARENT, ASKED, SelectRefused("r", 1, "no_instances", "none"), 0, 5, 9)
    assert (chosen.name, chosen.kind, chosen.parent, chosen.start_ns, chosen.end_ns) == (
        "choose",
        "server",
        PARENT.span,
        5,
        9,
    )
    assert chosen.attributes["headrace.overlap_tokens"] == 96
    assert (chosen.error, refused.error) == ("", "no_instances: none")
