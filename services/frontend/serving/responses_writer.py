"""Writes the answer of /v1/responses: items from the parts of a model's text, and events about them. Pure.

                ┌──▶ reasoning ──┐
     nothing ───┼──▶ message ◀───┼──▶ ended
                └──▶ call ◀──────┘            one item is open at a time; the next one of another kind closes it

Each item stands where the model wrote it: pieces of calls say how much content came before them. So the way in which
the text was cut into deltas does not change the response, and a full answer is one delta that is written like others.

A delta that only continues the open item is one event. Its bytes are joined from a beginning that is made once for each
item: 0.8 µs, where the chunk of a chat takes 0.3. `continuation_event` makes it, and changes nothing until
`continuation_sent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

import msgspec
from msgspec.structs import replace

from services.frontend.output.output import Delta, LogprobEntry
from services.frontend.protocol.chat_chunks import TokenLogprobs, Usage, chat_logprobs
from services.frontend.protocol.responses_events import (
    ArgumentsDone,
    IncompleteDetails,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseUsage,
    TextDone,
    ThoughtDone,
)
from services.frontend.protocol.responses_items import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputThought,
    ThoughtText,
)
from services.frontend.tool_parsers.parse_result import CallPiece

_encode = msgspec.json.Encoder().encode
_DONE: Literal["completed"] = "completed"
_DELTAS = {
    OutputMessage: (b"output_text", b',"content_index":0', b',"logprobs":[]'),
    OutputThought: (b"reasoning_text", b',"content_index":0', b""),
    OutputCall: (b"function_call_arguments", b"", b""),
}
"""For each kind of item the name of its delta event, and that event's other fields before and after the text."""


class _Open:
    """The open item, which grows."""

    def __init__(self, item: OutputItem, index: int) -> None:
        self.item = item
        self.index = index
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        kind, part, logprobs = _DELTAS[type(item)]
        self.head = b'{"type":"response.%b.delta","item_id":%b,"output_index":%d%b' % (
            *(kind, _encode(item.id), index, part),
        )
        """The beginning of a delta's event. `plain` goes up to its text, for a delta without log-probabilities."""
        self.plain = b'%b%b,"delta":' % (self.head, logprobs)

    def whole(self, status: Literal["completed", "incomplete"]) -> OutputItem:
        text = "".join(self.pieces)
        match self.item:
            case OutputMessage():
                return replace(self.item, content=[OutputText(text, logprobs=self.logprobs)], status=status)
            case OutputThought():
                return replace(self.item, content=[ThoughtText(text)], status=status)
            case OutputCall():
                return replace(self.item, arguments=text, status=status)
            case _:
                assert_never(self.item)


class ResponseWriter:
    """Writes one response. `push`, `finish` and `fail` return the events that follow."""

    def __init__(self, response: Response, unique: str) -> None:
        """Create it. `response` is the response as it begins; items are named after `unique`."""
        self.response = response
        """The response; it has no output until the end."""
        self._unique = unique
        self._items: list[OutputItem] = []
        self._open: _Open | None = None
        self._content = 0
        """The count of characters in all messages."""
        self._sequence = 0
        self._events: list[bytes] = []

    def first_events(self) -> list[bytes]:
        """Return the first events."""
        self._say(ResponseCreated(self.response, self._sequence))
        self._say(ResponseInProgress(self.response, self._sequence))
        return self._said()

    def push(self, delta: Delta) -> list[bytes]:
        """Add a delta to the response."""
        if delta.reasoning:
            self._grow(self._thought(), delta.reasoning)
        text = delta.text
        for piece in delta.calls:
            if piece.name:
                before = piece.content_before - self._content
                self._say_text(text[:before])
                text = text[before:]
                self._begin_call(piece)
            if piece.arguments:
                assert self._open is not None, "a call's first piece begins it"
                self._grow(self._open, piece.arguments)
        self._say_text(text, delta.entries)
        return self._said()

    def finish(self, finish: str, usage: Usage, reasoning_tokens: int, now: int) -> list[bytes]:
        """End the response for the reason `finish`, at the time `now` in seconds since 1970."""
        cut = finish == "length"
        if not self._items and self._open is None:
            self._message()  # an empty answer is a message too
        self._close("incomplete" if cut else _DONE)
        self.response = replace(
            self.response,
            status="incomplete" if cut else _DONE,
            completed_at=None if cut else now,
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=self._items,
            usage=ResponseUsage.of(usage, reasoning_tokens),
        )
        last = ResponseIncomplete if cut else ResponseCompleted
        self._say(last(self.response, self._sequence))
        return self._said()

    def fail(self, error: ResponseError) -> bytes:
        """End the response with an error; return the last event."""
        if self._open is not None:
            self._items.append(self._open.whole("incomplete"))
            self._open = None
        self.response = replace(self.response, status="failed", error=error, output=self._items)
        self._say(ResponseFailed(self.response, self._sequence))
        return self._said()[0]

    # --- the fast path

    def continuation_event(self, delta: Delta) -> bytes | None:
        """Return the event of a delta that only continues the open item; None for others, which are to be pushed."""
        grown, text, calls = self._open, delta.text, delta.calls
        if grown is None or delta.entries:
            return None
        if text:
            alone = not calls and not delta.reasoning
            return self._event(grown, text) if alone and type(grown.item) is OutputMessage else None
        if delta.reasoning:
            return self._event(grown, delta.reasoning) if not calls and type(grown.item) is OutputThought else None
        if len(calls) == 1 and not calls[0].name and type(grown.item) is OutputCall:
            return self._event(grown, calls[0].arguments)
        return None

    def continuation_sent(self, delta: Delta) -> None:
        """Record that the `continuation_event` of a delta was sent."""
        assert self._open is not None
        self._open.pieces.append(delta.text or delta.reasoning or delta.calls[0].arguments)
        self._content += len(delta.text)
        self._sequence += 1

    # --- items

    def _thought(self) -> _Open:
        if self._open is not None and isinstance(self._open.item, OutputThought):
            return self._open
        return self._begin_text(OutputThought(self._name("rs"), [], "in_progress"), ThoughtText(""))

    def _message(self) -> _Open:
        if self._open is not None and isinstance(self._open.item, OutputMessage):
            return self._open
        return self._begin_text(OutputMessage(self._name("msg"), [], "in_progress"), OutputText(""))

    def _begin_text(self, item: OutputThought | OutputMessage, part: ThoughtText | OutputText) -> _Open:
        grown = self._begin(item)
        self._say(PartAdded(item.id, grown.index, part, self._sequence))
        return grown

    def _begin_call(self, piece: CallPiece) -> None:
        self._begin(OutputCall(self._name("fc"), piece.id, piece.name, "", "in_progress"))

    def _name(self, prefix: str) -> str:
        return f"{prefix}_{self._unique}-{len(self._items) + (self._open is not None)}"

    def _begin(self, item: OutputItem) -> _Open:
        self._close(_DONE)
        self._open = _Open(item, len(self._items))
        self._say(ItemAdded(item, self._open.index, self._sequence))
        return self._open

    def _close(self, status: Literal["completed", "incomplete"]) -> None:
        grown, self._open = self._open, None
        if grown is None:
            return
        index, item = grown.index, grown.whole(status)
        match item:
            case OutputMessage(content=[part]):
                self._say(TextDone(item.id, index, part.text, part.logprobs, self._sequence))
                self._say(PartDone(item.id, index, part, self._sequence))
            case OutputThought(content=[thought]):
                self._say(ThoughtDone(item.id, index, thought.text, self._sequence))
                self._say(PartDone(item.id, index, thought, self._sequence))
            case OutputCall():
                self._say(ArgumentsDone(item.id, index, item.name, item.arguments, self._sequence))
        self._items.append(item)
        self._say(ItemDone(item, index, self._sequence))

    def _say_text(self, text: str, entries: Sequence[LogprobEntry] = ()) -> None:
        if not (text or entries):
            return
        grown = self._message()
        if entries:
            logprobs = chat_logprobs(entries).content
            grown.logprobs += logprobs
            told = (grown.head, _encode(logprobs), _encode(text), self._sequence)
            self._events.append(b'%b,"logprobs":%b,"delta":%b,"sequence_number":%d}' % told)
            grown.pieces.append(text)
            self._sequence += 1
        else:
            self._grow(grown, text)
        self._content += len(text)

    def _grow(self, grown: _Open, text: str) -> None:
        self._events.append(self._event(grown, text))
        grown.pieces.append(text)
        self._sequence += 1

    # --- bytes

    def _event(self, grown: _Open, text: str) -> bytes:
        return b'%b%b,"sequence_number":%d}' % (grown.plain, _encode(text), self._sequence)

    def _say(self, event: ResponseEvent) -> None:
        assert event.sequence_number == self._sequence
        self._events.append(_encode(event))
        self._sequence += 1

    def _said(self) -> list[bytes]:
        said, self._events = self._events, []
        return said

    def validate(self) -> None:
        """Assert the invariants."""
        assert not self._events, "events are handed over by what made them"
        assert all(item.status != "in_progress" for item in self._items)
        assert self._open is None or self._open.index == len(self._items)
        items = [*self._items, *([] if self._open is None else [self._open.whole(_DONE)])]
        texts = [item.content[0].text for item in items if isinstance(item, OutputMessage)]
        assert self._content == sum(map(len, texts))
