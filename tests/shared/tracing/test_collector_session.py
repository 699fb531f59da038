"""shared/tracing/collector_session.py: an answer of any form is read in bounded time and memory."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator

import pytest

from shared.config import TraceConfig
from shared.tracing.collector_session import ANSWER_LIMIT_BYTES
from shared.tracing.exporter import OtlpExporter
from shared.tracing.spans import finished
from shared.tracing.traceparent import TraceParent
from tests.collector import Collector, collector

RESOURCE = {"service.name": "headrace-test", "service.instance.id": "i1"}
SPAN = finished("a", TraceParent("1" * 32, "2" * 16), "3" * 16, 1, 2, kind="server")
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + bytes(65536) + b"\r\n"


def sent(received: Collector, timeout_s: float = 60.0) -> str:
    """Send a span; return why that failed, or nothing."""
    exporter = OtlpExporter(TraceConfig(endpoint=received.url, timeout_s=timeout_s))
    try:
        return exporter.send([SPAN], RESOURCE)
    finally:
        exporter.abort()


def answered(pieces: Iterable[bytes]) -> str:
    with collector() as received:
        received.mode, received.pieces = "pieces", lambda: pieces
        return sent(received)


def test_a_body_without_end_is_read_to_its_limit_and_is_a_failure() -> None:
    assert "answers with more than 64 KiB" in answered(itertools.chain([CHUNKED], itertools.repeat(CHUNK)))


def test_a_compressed_body_is_not_unpacked() -> None:
    packed = zlib.compress(bytes(64 << 20), wbits=31)[:ANSWER_LIMIT_BYTES]
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n".encode()
    assert answered([head, packed]) == ""


@pytest.mark.parametrize(
    ("begins", "repeats"),
    [
        (CHUNKED, b"1\r\nx\r\n"),
        (CHUNKED, b"0"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 503 Later\r\nContent-Length: 60000\r\n\r\n", b"x"),
    ],
    ids=["chunks", "chunk size", "known length", "unknown length", "header", "interim answers", "a refusal"],
)
def test_an_answer_that_comes_byte_by_byte_ends_with_the_timeout(begins: bytes, repeats: bytes) -> None:
    with collector() as received:

        def drip() -> Iterator[bytes]:
            yield begins
            while not received.closing.wait(0.02):
                yield repeats

        received.mode, received.pieces = "pieces", drip
        assert "no whole answer within 0." in sent(received, timeout_s=0.25)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_that_names_the_address(status: int) -> None:
    head = f"HTTP/1.1 {status} Elsewhere\r\nLocation: https://collector/v1\r\nContent-Length: 0\r\n\r\n"
    assert f"answers {status}: it redirects to https://collector/v1" in answered([head.encode()])


def test_other_answers_below_400_are_failures_too() -> None:
    assert "answers 304: it redirects to no address" in answered([b"HTTP/1.1 304 Not Modified\r\n\r\n"])


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n{}",
    ],
)
def test_short_answers_of_all_forms_are_success(answer: bytes) -> None:
    assert answered([answer]) == ""


def test_batches_after_an_answer_that_was_cut_are_sent() -> None:
    with collector() as received:
        received.mode, received.pieces = "pieces", lambda: [CHUNKED, CHUNK, CHUNK]
        exporter = OtlpExporter(TraceConfig(endpoint=received.url))
        assert "more than 64 KiB" in exporter.send([SPAN], RESOURCE)
        received.mode = "take"
        assert [exporter.send([SPAN], RESOURCE) for _ in range(2)] == ["", ""]
        exporter.abort()
        assert len(received.spans) == 2
