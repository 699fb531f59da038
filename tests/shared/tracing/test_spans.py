from __future__ import annotations

from random import Random

from shared.tracing.spans import VALUE_LIMIT_CHARACTERS, AttributeValue, SpanIds, finished
from shared.tracing.traceparent import TraceParent, parse

PLACE = TraceParent("1" * 32, "2" * 16)


class Zeros(Random):
    def getrandbits(self, _bits: int) -> int:
        return 0


def test_ids_are_valid_in_a_header_even_if_zero_is_drawn() -> None:
    for draw in (Random(1), Zeros()):
        ids = SpanIds(draw)
        place = TraceParent(ids.trace(), ids.span())
        assert parse([place.header]) == place
        assert ids.child(place).trace == place.trace


def test_a_span_does_not_end_before_its_start() -> None:
    assert finished("a", PLACE, "", 10, 5).end_ns == 10


def test_texts_and_numbers_are_bounded() -> None:
    given: dict[str, AttributeValue] = {
        "text": "x" * 1000,
        "large": 1 << 70,
        "small": -(1 << 70),
        "flag": True,
        "many": ("a",),
    }
    span = finished("a", PLACE, "", 0, 1, attributes=given, error="e" * 1000)
    assert len(str(span.attributes["text"])) == len(span.error) == VALUE_LIMIT_CHARACTERS
    assert (span.attributes["large"], span.attributes["small"]) == ((1 << 63) - 1, -((1 << 63) - 1))
    assert span.attributes["flag"] is True
    assert span.attributes["many"] == ("a",)
