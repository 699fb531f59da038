"""An OTLP collector of a test's own: it decodes the real protobuf, and fails as a test wishes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from tests.servers import free_port

SERVER = OtlpSpan.SPAN_KIND_SERVER
CLIENT = OtlpSpan.SPAN_KIND_CLIENT


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it came over the wire."""

    name: str
    service: str
    instance: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int
    kind: int
    failed: bool
    attributes: dict[str, Any]


class Collector:
    """What has come so far. `mode` is what the next requests get: taken, status 500, no answer until `close`, or what
    `pieces` yields, as it is."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/traces"
        self.mode: Literal["take", "fail", "hang", "pieces"] = "take"
        self.pieces: Callable[[], Iterable[bytes]] = tuple
        self.authorizations: set[str] = set()
        self.requests = 0
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All spans that were taken."""
        with self._lock:
            return list(self._spans)

    def of_trace(self, trace: str) -> list[ReceivedSpan]:
        """The spans of one trace, by start."""
        return sorted((span for span in self.spans if span.trace == trace), key=lambda span: span.start_ns)

    def take(self, body: bytes) -> None:
        """Decode a request and keep its spans."""
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        taken = [
            _received(span, _plain(resource.resource.attributes))
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += taken


@contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    """A collector that listens while the context is open."""
    one = Collector(port or free_port())

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            one.requests += 1
            one.authorizations.add(self.headers.get("Authorization", ""))
            if one.mode == "hang":
                one.closing.wait()
                return
            if one.mode == "pieces":
                with suppress(ConnectionError):  # the client has left
                    for piece in one.pieces():
                        self.wfile.write(piece)
                return
            if one.mode == "take":
                assert self.headers["Content-Type"] == "application/x-protobuf"
                one.take(body)
            self.send_response(200 if one.mode == "take" else 500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", int(one.url.split(":")[2].split("/")[0])), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield one
    finally:
        one.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _received(span: OtlpSpan, process: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        service=process["service.name"],
        instance=process["service.instance.id"],
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        kind=span.kind,
        failed=span.status.code == 2,
        attributes=_plain(span.attributes),
    )


def _plain(attributes: Any) -> dict[str, Any]:
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found
