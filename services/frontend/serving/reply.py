"""An answer in the form of its operation: one body, or chunks.

Choices ─▶ deltas, each of one choice ─▶ its AnswerEncoder ─▶ ChatReply ──▶ HTTP or NATS
Stream ──▶ deltas ─▶ the AnswerWriter of another API than chat's ─▶ EventReply ─┘
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Literal

import msgspec
from msgspec import Struct

from services.frontend.anthropic.writer import MessageWriter
from services.frontend.ollama.answers import OllamaWriter
from services.frontend.output.output import Delta
from services.frontend.protocol.chat_chunks import AnswerEncoder, usage_of
from services.frontend.protocol.errors import ErrorBody, Failure
from services.frontend.protocol.foreign import Ended
from services.frontend.requests.stream import NOTHING, Stream, join_deltas
from services.frontend.serving.choices import Choices
from services.frontend.serving.responses_writer import KEEPALIVE, ResponseWriter

Framing = Literal["data", "event", "line", "raw"]
"""How chunks are framed over HTTP. data: server-sent events that end with [DONE]. event: server-sent events with the
name that is in their first field, `type`. line: lines, without events. raw: as they are, of an answer that passes."""


class Chunk(Struct, frozen=True):
    """One JSON object of a streamed answer."""

    payload: bytes
    more: bool = False
    """Whether more follows at once: another chunk, or after the last one the API's own end of the answer."""
    last: bool = False


SILENCE = b""
"""The payload of a chunk that says only that the answer goes on: over HTTP, a comment. It follows `wake`."""


class Opening(Struct, frozen=True):
    """A stream before there is a reply: its body is decoded, and its prompt is being prepared."""

    framing: Framing = "data"
    silence_events: Callable[[], list[bytes]] = list
    """Returns what can be sent while nothing comes. If that is nothing, SILENCE can be."""
    error_events: Callable[[Failure], list[bytes]] = lambda failure: [failure.payload]
    """Returns the events of an answer that failed before there was a reply."""
    keepalive_chunk: Callable[[], bytes] = lambda: KEEPALIVE
    """Returns a chunk that adds nothing to the answer."""


class ChatReply(Struct, frozen=True):
    """The answer of a chat or a completion while it is made. EventReply has the same methods."""

    encoders: Sequence[AnswerEncoder]
    """The encoder of each choice."""
    choices: Choices
    echoes: Sequence[Delta]
    """What is before each choice's answer, mostly nothing."""
    with_usage: bool
    each_usage: bool = False
    """Whether each chunk has the usage of its choice, up to it."""
    framing: Framing = "data"

    async def full_body(self) -> bytes:
        """Return the answer as one JSON object. Raise the error that ended the request."""
        deltas = [[echo] for echo in self.echoes]
        async for index, delta in self.choices:
            if delta is not None:
                deltas[index].append(delta)
        streams = self.choices.streams
        ended = [(join_deltas(found), streams[index].finish) for index, found in enumerate(deltas)]
        return self.encoders[0].full_body(ended, self.choices.usage)

    def keepalive_chunk(self) -> bytes:
        """Return a chunk that adds nothing to the answer. It may be sent at any time before the last chunk."""
        [first, *others] = self.encoders
        # With several choices the first may have ended, so a chunk without choices is sent.
        return first.frame.keepalive_chunk() if others else first.delta_chunk(join_deltas(()))

    def error_chunk(self, failure: Failure) -> bytes:
        """Return the last chunk of an answer that failed after it had begun."""
        return failure.payload

    def wake(self) -> None:
        """Make `chunks` yield SILENCE if it waits for text."""
        self.choices.wake()

    async def chunks(self, send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:
        """Yield the answer in chunks. The first comes with the first text, or with the first `wake`, so that earlier
        errors are raised.

        Once it is out, chunks go to `send`, if there is one; only those that `send` does not take are yielded.
        """
        begun, left = set[int](), len(self.encoders)
        async for index, delta in self.choices:
            if delta is NOTHING:
                yield Chunk(SILENCE)
                continue
            encoder, stream = self.encoders[index], self.choices.streams[index]
            usage = stream.usage if self.each_usage else None  # before the client makes this wait
            if index not in begun:
                begun.add(index)
                none = None if usage is None else usage_of(usage.prompt_tokens, 0, 0)
                if (first := encoder.first_chunk()) is not None:
                    yield Chunk(encoder.frame.with_usage(first, none), more=True)
                if (echo := self.echoes[index]).text or echo.entries:
                    yield Chunk(encoder.frame.with_usage(encoder.delta_chunk(echo), none), more=True)
            if delta is not None:
                yield Chunk(encoder.frame.with_usage(encoder.delta_chunk(delta), usage))
                if send is not None:
                    stream.send_directly(self._encode(encoder, stream), send)
                continue
            left -= 1
            last = encoder.frame.with_usage(encoder.last_chunk(stream.finish), usage)
            yield Chunk(last, more=not left, last=not left and not self.with_usage)
        if self.with_usage:
            yield Chunk(self.encoders[0].frame.usage_chunk(self.choices.usage), more=True, last=True)

    def _encode(self, encoder: AnswerEncoder, stream: Stream) -> Callable[[Delta], bytes]:
        """Return what encodes a delta that was just made."""
        if not self.each_usage:
            return encoder.delta_chunk
        return lambda delta: encoder.frame.with_usage(encoder.delta_chunk(delta), stream.usage)


AnswerWriter = MessageWriter | OllamaWriter | ResponseWriter
"""Writes an answer as events, each method as its docstring there says."""


def opening_of(writer: MessageWriter | OllamaWriter) -> Opening:
    """Return the opening of a stream that this will write."""
    return Opening(writer.framing, writer.silence_events, partial(_error_events, writer))


def response_opening(writer: ResponseWriter) -> Opening:
    """Return the opening of a response's stream. `writer` writes a response of which only the request is known, and
    only if it fails."""

    def failed(failure: Failure) -> list[bytes]:
        return [*writer.silence_events(), *_error_events(writer, failure)]  # clients expect its first events

    return Opening(writer.framing, error_events=failed)


def _error_events(writer: AnswerWriter, failure: Failure) -> list[bytes]:
    return [writer.error(failure.status, message_of(failure.payload))]


class EventReply(Struct):
    """The answer of one choice in the events of another API than chat's while it is made; its methods are those of
    ChatReply."""

    writer: AnswerWriter
    stream: Stream
    received_s: float
    """When the request's body was complete, on the loop's clock."""

    @property
    def framing(self) -> Framing:
        """How chunks are framed over HTTP."""
        return self.writer.framing

    async def full_body(self) -> bytes:
        """Return the answer. Raise the error that ended the request."""
        deltas = [delta async for delta in self.stream]
        return self.writer.full_body(join_deltas(deltas), self._ended())

    def keepalive_chunk(self) -> bytes:
        """Return an event that adds nothing to the answer."""
        return KEEPALIVE

    def error_chunk(self, failure: Failure) -> bytes:
        """Return the last event of an answer that failed after it had begun."""
        return _error_events(self.writer, failure)[0]

    def wake(self) -> None:
        """Make `chunks` yield what the API has for a silence, if it waits for text."""
        self.stream.wake()

    async def chunks(self, send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:
        """Yield the events. The first ones come with the first text; `ChatReply.chunks` explains `send`."""
        writer, opened = self.writer, False
        async for delta in self.stream:
            if delta is NOTHING:
                events = writer.silence_events() or [SILENCE]
            else:
                first = [] if opened else writer.first_events(self.stream.usage)
                events, opened = [*first, *writer.push(delta)], True
            for at, event in enumerate(events, 1):
                yield Chunk(event, more=at < len(events))
            if opened and send is not None:
                self.stream.send_directly(lambda delta: delta, partial(self._send_continuation, send))
        first = [] if opened else writer.first_events(self.stream.usage)
        *events, last = *first, *writer.last_events(self._ended())
        for event in events:
            yield Chunk(event, more=True)
        yield Chunk(last, more=True, last=True)

    def _send_continuation(self, send: Callable[[bytes], bool], delta: Delta) -> bool:
        """Send a delta that is one event. Return whether it was sent; `chunks` yields others."""
        event = self.writer.continuation(delta)
        if event is None or not send(event):
            return False
        self.writer.continued(delta)
        return True

    def _ended(self) -> Ended:
        stream, now = self.stream, time.monotonic()
        first = now if stream.first_tokens is None else stream.first_tokens
        times = (int(time.time()), now - self.received_s, first - stream.started, now - first)
        output = stream.output
        return Ended(stream.finish, output.stop_string, stream.usage, output.thinking_tokens, *times)


def message_of(payload: bytes) -> str:
    """Return the message of a failure in OpenAI's form."""
    return msgspec.json.decode(payload, type=ErrorBody).error.message
