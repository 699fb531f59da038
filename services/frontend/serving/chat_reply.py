"""The answer of a chat or a completion on its way to a door: whole, or in chunks.

Choices ─▶ deltas, each of one choice ─▶ its Shape ─▶ chunks; its next ones go straight from its stream to the door
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from services.frontend.output.output import Delta
from services.frontend.protocol.chat_chunks import AnswerEncoder, FinishedChoice
from services.frontend.protocol.errors import Failure
from services.frontend.requests.stream import join_deltas
from services.frontend.serving.choices import Choices
from services.frontend.serving.reply import Chunk


class ChatReply:
    """One request's answer, in the shape of its operation."""

    typed_events = False

    def __init__(
        self,
        shapes: Sequence[AnswerEncoder],
        choices: Choices,
        echoes: Sequence[str],
        *,
        streams: bool,
        with_usage: bool,
    ) -> None:
        """A shape and an echo (a text before the answer, mostly none) for each choice."""
        self.streamed = streams
        """Whether the client wants chunks."""
        self._with_usage = with_usage
        self._shapes = shapes
        self._choices = choices
        self._echoes = echoes

    async def full_body(self) -> bytes:
        """The answer as one JSON object. Raises what ended the request."""
        deltas = [[Delta(echo)] for echo in self._echoes]
        async for index, delta in self._choices:
            if delta is not None:
                deltas[index].append(delta)
        finishes = self._choices.streams
        ended = [
            FinishedChoice(index, join_deltas(found), finishes[index].finish) for index, found in enumerate(deltas)
        ]
        return self._shapes[0].full_body(ended, self._choices.usage)

    def keepalive_chunk(self) -> bytes:
        """A chunk that adds nothing to the answer; it may come at any time before the last one."""
        [first, *others] = self._shapes
        # The first of several choices may have ended.
        return first.keepalive_chunk() if others else first.delta_chunk(join_deltas(()))

    def error_chunk(self, wrong: Failure) -> bytes:
        """As in Reply."""
        return wrong.payload

    async def chunks(self, send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:
        """The answer in pieces; the first comes with the first text, so that errors before it stay errors.

        Once that of a choice is out, its pieces go to `send`, where there is one; only what it does not take comes
        here.
        """
        choices, opened, left = self._choices, set[int](), len(self._shapes)
        async for index, delta in choices:
            shape, stream = self._shapes[index], choices.streams[index]
            if index not in opened:
                opened.add(index)
                if (opening := shape.first_chunk()) is not None:
                    yield Chunk(opening, more=True)
                if self._echoes[index]:
                    yield Chunk(shape.delta_chunk(Delta(self._echoes[index])), more=True)
            if delta is not None:
                yield Chunk(shape.delta_chunk(delta))
                if send is not None:
                    stream.send_directly(shape.delta_chunk, send)
                continue
            left -= 1
            yield Chunk(shape.last_chunk(stream.finish), more=not left, last=not left and not self._with_usage)
        if self._with_usage:
            yield Chunk(self._shapes[0].usage_chunk(choices.usage), more=True, last=True)
