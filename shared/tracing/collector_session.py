"""A requests session that reads a collector's answer within a time in all and a size.

    connect ─▶ send ─▶ [ headers ─▶ at most ANSWER_LIMIT_BYTES of the body ]
       └─ the time is over: the connection is cut, so that the read under way ends

A collector's answer is empty or some bytes. A timeout of requests' holds for each read alone, and OpenTelemetry reads
the body whole and takes a redirect, which it does not follow, for success. Imported only if tracing is on.
"""

from __future__ import annotations

import socket
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter

from shared.deadline import Deadline, cut_connection

ANSWER_LIMIT_BYTES = 64 << 10
"""The maximum number of bytes of an answer's body."""
LOCATION_LIMIT_CHARACTERS = 200
"""The maximum length of a redirect's address in an error."""


class CollectorError(requests.RequestException):
    """An answer that is no success; OpenTelemetry does not try again after it."""


class CollectorSession(requests.Session):
    """A session for one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._deadline: Deadline | None = None
        """The deadline of the last request."""
        self._socket: socket.socket | None = None
        """The socket on which its answer is awaited or read."""
        adapter = _Adapter(self._reading)
        self.mount("http://", adapter)
        self.mount("https://", adapter)

    def request(self, method: str, url: str, **options: Any) -> requests.Response:  # type: ignore[override]
        """Send a request, and return its answer with at most ANSWER_LIMIT_BYTES of its body.

        `timeout`, in seconds, is for all of it. Raise CollectorError for an answer that is late, too long or a
        redirect, and requests' exceptions.
        """
        timeout_s = options["timeout"]
        self._socket = None
        answer = requests.Response()
        with Deadline(timeout_s, self._cut) as deadline:
            self._deadline = deadline
            try:
                with super().request(method, url, stream=True, **options) as answer:
                    _read(answer)
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as wrong:
                if not deadline.late and not isinstance(wrong, requests.Timeout):
                    raise
                deadline.late = True
        if deadline.late:  # also if the body seems to have ended, as one without a length does when it is cut
            raise CollectorError(f"no whole answer within {timeout_s:.1f} s")
        return answer

    def _reading(self, connection: socket.socket) -> None:
        """Note the socket from which an answer is read. Raise TimeoutError if the time is over."""
        self._socket = connection
        if self._deadline is not None and self._deadline.late:
            raise TimeoutError

    def _cut(self) -> None:
        if self._socket is not None:  # otherwise `_reading` comes later, and finds that the time is over
            cut_connection(self._socket)


class _Adapter(HTTPAdapter):
    """An adapter whose connections say from which socket they read an answer."""

    def __init__(self, reading: Any) -> None:
        self._reading = reading
        super().__init__()

    def get_connection_with_tls_context(self, *given: Any, **named: Any) -> Any:
        """Return the pool of connections for a request."""
        pool = super().get_connection_with_tls_context(*given, **named)
        if "ConnectionCls" not in vars(pool):
            pool.ConnectionCls = _noting(pool.ConnectionCls, self._reading)
        return pool


def _noting(kind: Any, reading: Any) -> Any:
    """Return a kind of connection that calls `reading` with its socket before it reads an answer."""

    class Noting(kind):  # type: ignore[misc]
        def getresponse(self) -> Any:
            reading(self.sock)
            return super().getresponse()

    return Noting


def _read(answer: requests.Response) -> None:
    """Read an answer's body. Raise CollectorError if it is too long, or if the answer is a redirect."""
    if 300 <= answer.status_code < 400:
        place = answer.headers.get("Location", "")[:LOCATION_LIMIT_CHARACTERS]
        raise CollectorError(f"answers {answer.status_code}: it redirects to {place or 'no address'}")
    body = answer.raw.read(ANSWER_LIMIT_BYTES + 1, decode_content=False)
    if len(body) > ANSWER_LIMIT_BYTES and answer.ok:
        raise CollectorError(f"answers with more than {ANSWER_LIMIT_BYTES >> 10} KiB, as no collector does")
    answer._content = body[:ANSWER_LIMIT_BYTES]  # the place where requests keeps a body that was read
