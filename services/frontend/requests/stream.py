"""One request's output on its way from the step frames to whoever answers the client.

    Emit ─▶ Output ─┬─▶ deltas waiting ─▶ `async for delta in stream` ─▶ the finish reason, or the error raised
                    └─▶ `send`, where the reader gave one and waits for more, and it takes them

What a slow client leaves waiting is handed over as one delta. It is bounded by the request's own max_tokens. `send`
spares the reader's task its turn: it wakes for the first delta, for what was not taken, and for the end. The streams
of one request, where it wants several choices, have one Reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from services.frontend.output.output import Delta, Output
from services.frontend.output.parsed_output import ParsedOutput
from services.frontend.protocol.chat_chunks import Usage, usage_of
from services.frontend.requests.session import Fail, Finish, Session
from services.frontend.tool_parsers.parse_result import join_pieces
from shared.errors import HeadraceError, RequestTimeout
from shared.messages import Sampling, TokenLogprob

T = TypeVar("T")


class InferenceRequest(Struct, frozen=True):
    """A request that was found good: what it takes to compute it."""

    id: str
    model: str
    prompt: bytes
    """Packed u32."""
    prompt_tokens: int
    hashes: bytes
    """Sequence hashes of the prompt's full blocks, packed u64."""
    sampling: Sampling
    salt: str
    affinity_key: str
    """Requests of one non-empty session prefer one worker."""
    grammar_param: str = ""
    """The field that the grammar comes from."""
    embedding_size: int = 0
    """Floats, where an embedding is asked for."""
    is_follower: bool = False
    """Another one of the same request comes before it: it is not refused for having to wait, perhaps for that one."""
    repeats_prompt: bool = False
    """That one has the same prompt."""


class StreamSelector:
    """Whoever reads the streams of a request: it waits until one of them calls."""

    def __init__(self) -> None:
        self.waiting = False
        """Whether it has all there was, and waits; only then nothing can overtake what it holds."""
        self._called: dict[Stream, None] = {}
        self._wake = asyncio.Event()

    def mark_ready(self, stream: Stream) -> None:
        """The stream has something for it."""
        self.waiting = False
        self._called[stream] = None
        self._wake.set()

    async def wait_ready(self) -> list[Stream]:
        """Those that have called since it asked last, at least one. It must have read all there was."""
        while not self._called:
            self._wake.clear()
            self.waiting = True
            await self._wake.wait()
        called = list(self._called)
        self._called.clear()
        return called


class Stream:
    """The reader's end, and the service's."""

    def __init__(
        self,
        job: InferenceRequest,
        session: Session,
        output: Output | ParsedOutput,
        reader: StreamSelector | None = None,
    ) -> None:
        """`reader`: of this stream and others."""
        self.request = job
        self.session = session
        self.finish = ""
        """Why the output ended, once it did with an answer."""
        self.ended = False
        self.awaits_first_token = False
        """Its reader waits for its first token, which may bring no text."""
        self.embedding = b""
        """The answer, where it is one; as in Part."""
        self._output = output
        self._reader = StreamSelector() if reader is None else reader
        self._waiting: list[Delta] = []
        self._encode: Callable[[Delta], Any] | None = None
        self._send: Callable[[Any], bool] | None = None
        self._error: HeadraceError | None = None
        self._stopped = False

    # --- the service's end

    def add_tokens(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> bool:
        """New output; whether it reached a stop string."""
        self._add(self._output.push(tokens, logprobs))
        return self._stopped

    def end(self, last: Finish | Fail) -> None:
        """There is no more. A stop string in the last tokens goes before what the worker says."""
        if self._stopped:
            self.finish = "stop"
        elif isinstance(last, Fail):
            self._error = last.error
        else:
            self._add(self._output.finish(short=last.reason == "length"))
            self.finish = "stop" if self._stopped else last.reason
            self.embedding = last.embedding
        if self.finish == "stop" and self._output.calls:
            self.finish = "tool_calls"
        self.ended = True
        self._reader.mark_ready(self)

    def _add(self, delta: Delta) -> None:
        self._stopped = delta.stopped
        if not (delta.text or delta.entries or delta.calls or delta.reasoning):
            if self.awaits_first_token:
                self._reader.mark_ready(self)
            return
        idle = self._reader.waiting
        if idle and self._send is not None and self._encode is not None and self._send(self._encode(delta)):
            return
        self._waiting.append(delta)
        self._reader.mark_ready(self)

    # --- the reader's end

    def send_directly(self, encode: Callable[[Delta], T], send: Callable[[T], bool]) -> None:
        """From now on, while the reader waits, deltas go to `send` at once, unless it says that it cannot take one."""
        self._encode, self._send = encode, send

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Raises the error that ended the request, after what came before it."""
        while True:
            if (delta := self.pop_delta()) is not None:
                yield delta
            elif self.ended:
                self.raise_error()
                return
            else:
                await self._reader.wait_ready()

    def pop_delta(self) -> Delta | None:
        """What waited, taken away; None: nothing did."""
        if not self._waiting:
            return None
        waiting, self._waiting = self._waiting, []
        return waiting[0] if len(waiting) == 1 else join_deltas(waiting)

    def raise_error(self) -> None:
        """Raises the error that ended the request."""
        if self._error is not None:
            raise self._error

    @property
    def prompt_computed(self) -> bool:
        """Whether its prompt is computed: it has had a token, or an end with none."""
        return bool(self.session.tokens) or (self.ended and self._error is None)

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._error is not None

    @property
    def timed_out(self) -> bool:
        """Whether its time was over before its end."""
        return isinstance(self._error, RequestTimeout)

    @property
    def reasoning_tokens(self) -> int:
        """Of the output so far, those up to the last one that thinking came from."""
        return self._output.thinking_tokens

    @property
    def usage(self) -> Usage:
        """Tokens counted so far; a stop string's own tokens count, what came behind it does not."""
        produced = self._output.counted if self._stopped else len(self.session.tokens)
        session = self.session
        cached = (session.cached_tokens, session.cached_host_tokens, session.cached_disk_tokens)
        return usage_of(self.request.prompt_tokens, produced, *cached)


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Several deltas as one."""
    return Delta(
        "".join(delta.text for delta in deltas),
        tuple(entry for delta in deltas for entry in delta.entries),
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=join_pieces([piece for delta in deltas for piece in delta.calls]),
    )
