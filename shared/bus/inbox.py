"""The answers that a bus waits for.

    requests   share one subscription; the last token of the subject tells them apart, and the first answer ends one
    probes     share it too: `no_responders()` is called if no process listens; any other answer ends the probe
    streams    have an inbox each, so that a process that sends to a closed stream learns that no process listens

If no process listens, the server sends an empty answer with the header `Status: 503`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count

from shared.bus.contract import LAST_HEADER, Message
from shared.errors import BusDown, NoResponders, Overloaded, RequestTimeout

PROBE_LIMIT = 4096
"""The maximum number of probes. Beyond it the oldest is forgotten, as if a process listened."""
NO_RESPONDERS = {"Status": "503"}


class ReplyStream:
    """The unread answers of a stream, or the error that ends it."""

    def __init__(self, inbox: str, subject: str, pending_limit: int) -> None:
        self.inbox = f"{inbox}.{secrets.token_hex(11)}"
        self._subject = subject
        self._pending_limit = pending_limit
        self._waiting: deque[Message] = deque()
        self._wrong: Exception | None = None
        self._wake = asyncio.Event()

    def deliver(self, message: Message) -> None:
        if _no_process_listens(message):
            self._end(NoResponders(f"no process listens on {self._subject}"))
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


class ReplyInbox:
    """All answers that a bus waits for. Requests and probes are answered on `prefix` plus one token."""

    def __init__(self, inbox: str = "_INBOX") -> None:
        self._inbox = inbox
        self.prefix = f"{inbox}.{secrets.token_hex(11)}."
        self._numbers = count()
        self._requests: dict[str, asyncio.Future[Message | None]] = {}
        self._probes: dict[str, Callable[[], None]] = {}
        self._streams: dict[ReplyStream, None] = {}

    def deliver(self, message: Message) -> None:
        """Deliver an answer below `prefix`; one that is no longer waited for is ignored."""
        answer = self._requests.get(message.subject)
        no_responders = self._probes.pop(message.subject, None)
        if answer is not None:
            if not answer.done():
                answer.set_result(message)
        elif no_responders is not None and _no_process_listens(message):
            no_responders()

    def fail(self, wrong: BusDown) -> None:
        """Fail all requests and streams: the connection broke, so answers may be lost. Probes stay."""
        for answer in self._requests.values():
            if not answer.done():
                answer.set_exception(wrong)
        for stream in self._streams:
            stream.fail(wrong)

    def probe(self, no_responders: Callable[[], None]) -> str:
        """Return a reply subject; `no_responders()` is called if no process listens."""
        if len(self._probes) >= PROBE_LIMIT:
            del self._probes[next(iter(self._probes))]
        reply = self._next()
        self._probes[reply] = no_responders
        return reply

    async def request(self, subject: str, timeout_s: float, send: Callable[[str], Awaitable[None]]) -> Message:
        """Call `send` with a reply subject, and return the answer. Raise NoResponders, RequestTimeout or BusDown."""
        loop = asyncio.get_running_loop()
        reply, answer = self._next(), loop.create_future()
        self._requests[reply] = answer
        late = loop.call_later(timeout_s, _give_up, answer)
        try:
            await send(reply)
            message: Message | None = await answer
        finally:
            late.cancel()
            del self._requests[reply]
        if message is None:
            raise RequestTimeout(f"no answer from {subject} in {timeout_s:g} s")
        if _no_process_listens(message):
            raise NoResponders(f"no process listens on {subject}")
        return message

    def stream(self, subject: str, pending_limit: int) -> ReplyStream:
        """Return a stream's receiving end. The caller must call `close_stream` afterwards."""
        stream = ReplyStream(self._inbox, subject, pending_limit)
        self._streams[stream] = None
        return stream

    def close_stream(self, stream: ReplyStream) -> None:
        self._streams.pop(stream, None)

    def validate(self) -> None:
        assert len(self._probes) <= PROBE_LIMIT
        assert not self._requests.keys() & self._probes.keys()

    def _next(self) -> str:
        return f"{self.prefix}{next(self._numbers):x}"


def _give_up(answer: asyncio.Future[Message | None]) -> None:
    if not answer.done():
        answer.set_result(None)


def _no_process_listens(message: Message) -> bool:
    return not message.payload and message.headers.get("Status") == NO_RESPONDERS["Status"]
