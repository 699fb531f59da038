"""Answers that a bus waits for.

    requests   share one subscription, told apart by the last token of its subjects; the first answer ends it
    probes     share it too: `gone()` if the server says that nobody listens; any other answer forgets it
    streams    have an inbox each, so that one who sends to a stream that was left is told that nobody listens

The server says that nobody listens by an empty answer with the header `Status: 503`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from itertools import count

from shared.bus.contract import LAST_HEADER, Message
from shared.errors import BusDown, NoResponders, Overloaded, RequestTimeout

PROBE_LIMIT = 4096
"""Probes kept; the oldest is forgotten, as if somebody still listened."""
NO_RESPONDERS = {"Status": "503"}


class _Request:
    """A future with the answer."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def take(self, message: Message) -> None:
        if self.answer.done():
            return
        if _nobody_listens(message):
            self.answer.set_exception(NoResponders(f"nobody listens on {self._subject}"))
        else:
            self.answer.set_result(message)

    def fail(self, wrong: BusDown) -> None:
        if not self.answer.done():
            self.answer.set_exception(wrong)


class ReplyStream:
    """Answers that wait to be read, or the error that ends them."""

    def __init__(self, inbox: str, subject: str, pending_limit: int) -> None:
        self.inbox = f"{inbox}.{secrets.token_hex(11)}"
        self._subject = subject
        self._pending_limit = pending_limit
        self._waiting: deque[Message] = deque()
        self._wrong: Exception | None = None
        self._wake = asyncio.Event()

    def take(self, message: Message) -> None:
        if _nobody_listens(message):
            self._end(NoResponders(f"nobody listens on {self._subject}"))
        elif len(self._waiting) >= self._pending_limit:
            self._end(Overloaded(f"{self._pending_limit} answers from {self._subject} wait unread"))
        else:
            self._waiting.append(message)
            self._wake.set()

    def fail(self, wrong: BusDown) -> None:
        self._end(wrong)

    async def messages(self, idle_timeout_s: float) -> AsyncIterator[Message]:
        while True:
            while not self._waiting or isinstance(self._wrong, Overloaded):
                if self._wrong is not None:
                    raise self._wrong
                self._wake.clear()
                try:
                    async with asyncio.timeout(idle_timeout_s):
                        await self._wake.wait()
                except TimeoutError:
                    raise RequestTimeout(f"no answer from {self._subject} in {idle_timeout_s:g} s") from None
            message = self._waiting.popleft()
            yield message
            if message.headers.get(LAST_HEADER) == "true":
                return

    def _end(self, wrong: Exception) -> None:
        if self._wrong is None:
            self._wrong = wrong
            self._wake.set()


class Inbox:
    """Everything a bus waits for. Requests and probes are answered on `prefix` and one more token."""

    def __init__(self, inbox: str = "_INBOX") -> None:
        self._inbox = inbox
        self.prefix = f"{inbox}.{secrets.token_hex(11)}."
        self._numbers = count()
        self._requests: dict[str, _Request] = {}
        self._probes: dict[str, Callable[[], None]] = {}
        self._streams: dict[ReplyStream, None] = {}

    def take(self, message: Message) -> None:
        """An answer below `prefix`; one that nobody waits for any more is ignored."""
        request = self._requests.get(message.subject)
        gone = self._probes.pop(message.subject, None)
        if request is not None:
            request.take(message)
        elif gone is not None and _nobody_listens(message):
            gone()

    def fail(self, wrong: BusDown) -> None:
        """The connection broke: answers cannot be relied on. Probes stay, for it says nothing of their addressees."""
        for request in self._requests.values():
            request.fail(wrong)
        for stream in self._streams:
            stream.fail(wrong)

    def probe(self, gone: Callable[[], None]) -> str:
        """The reply subject of a message whose sender wants to know that nobody listens."""
        if len(self._probes) >= PROBE_LIMIT:
            del self._probes[next(iter(self._probes))]
        reply = self._next()
        self._probes[reply] = gone
        return reply

    def request(self, subject: str) -> tuple[str, asyncio.Future[Message]]:
        """A reply subject and its answer; `forget` the former afterwards."""
        reply, request = self._next(), _Request(subject)
        self._requests[reply] = request
        return reply, request.answer

    def forget(self, reply: str) -> None:
        """Later answers to a request are ignored."""
        self._requests.pop(reply, None)

    def stream(self, subject: str, pending_limit: int) -> ReplyStream:
        """A stream's receiving end; `end` it afterwards."""
        stream = ReplyStream(self._inbox, subject, pending_limit)
        self._streams[stream] = None
        return stream

    def end(self, stream: ReplyStream) -> None:
        self._streams.pop(stream, None)

    def validate(self) -> None:
        assert len(self._probes) <= PROBE_LIMIT
        assert not self._requests.keys() & self._probes.keys()

    def _next(self) -> str:
        return f"{self.prefix}{next(self._numbers):x}"


def _nobody_listens(message: Message) -> bool:
    return not message.payload and message.headers.get("Status") == NO_RESPONDERS["Status"]
