"""Writes the answer of /v1/responses: items from the parts of a model's text, and events about them. Pure.

                ┌──▶ reasoning ──┐
     nothing ───┼──▶ message ◀───┼──▶ ended
                └──▶ call ◀──────┘            one item is open at a time; the next one of another kind closes it

Each item stands where the model wrote it: pieces of calls say how much content came before them. So the way in which
the text was cut into deltas does not change the response, and a full answer is one delta that is written like others.

A delta that only continues the open item is one event. Its bytes are joined from a beginning that is made once for each
item: 0.8 µs, where the chunk of a chat takes 0.3. `continuation` makes it, and changes nothing until `continued`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from services.frontend.output.output import Delta, LogprobEntry
from services.frontend.protocol import responses_events as events
from services.frontend.protocol.chat_chunks import TokenLogprobs, Usage, chat_logprobs
from services.frontend.protocol.foreign import Ended, arguments_of
from services.frontend.protocol.responses_events import Response
from services.frontend.protocol.responses_items import (
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputThought,
    SummaryText,
    ThoughtText,
)
from services.frontend.protocol.responses_tools import CalledTool

KEEPALIVE = b'{"type":"keepalive"}'
"""An event that adds nothing to a response. OpenAI's own streams have it too, and its clients ignore it."""

_encode = msgspec.json.Encoder().encode
_DONE: Literal["completed"] = "completed"
_DELTAS = {
    OutputMessage: (b"output_text", b',"content_index":0', b',"logprobs":[]'),
    OutputThought: (b"reasoning_text", b',"content_index":0', b""),
    OutputCall: (b"function_call_arguments", b"", b""),
    OutputCustomCall: (b"custom_tool_call_input", b"", b""),
}
"""For each kind of item the name of its delta event, and that event's other fields before and after the text."""
_SUMMARY_DELTA = (b"reasoning_summary_text", b',"summary_index":0', b"")
"""What stands for a thought's, where it is sent as its summary."""


class _OpenItem:
    """The open item, which grows."""

    def __init__(self, item: OutputItem, index: int, *, summed_up: bool) -> None:
        self.item = item
        self.index = index
        self.is_summary = summed_up and isinstance(item, OutputThought)
        """Whether the text is the item's summary, in place of its content."""
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        kind, part, logprobs = _SUMMARY_DELTA if self.is_summary else _DELTAS[type(item)]
        self.head = b'{"type":"response.%b.delta","item_id":%b,"output_index":%d%b' % (
            kind,
            _encode(item.id),
            index,
            part,
        )
        """The beginning of a delta's event. `plain` goes up to its text, for a delta without log-probabilities."""
        self.plain = b'%b%b,"delta":' % (self.head, logprobs)

    def whole(self, status: Literal["completed", "incomplete"]) -> OutputItem:
        text = "".join(self.pieces)
        if isinstance(self.item, OutputCall):
            if arguments_of(text) is None:
                status = "incomplete"  # the model did not finish it
            return replace(self.item, arguments=text, status=status)
        if isinstance(self.item, OutputCustomCall):
            return replace(self.item, input=text, status=status)
        if isinstance(self.item, OutputThought):
            if self.is_summary:
                return replace(self.item, summary=[SummaryText(text)], status=status)
            return replace(self.item, content=[ThoughtText(text)], status=status)
        return replace(self.item, content=[OutputText(text, logprobs=self.logprobs)], status=status)


class ResponseWriter:
    """Writes one response."""

    framing: Literal["event"] = "event"

    def __init__(
        self,
        response: Response,
        unique: str,
        keep: Callable[[Response, bytes], None],
        called: Mapping[str, CalledTool] = {},
    ) -> None:
        """Create it. `response` is the response as it begins; items are named after `unique`. `keep` gets a response
        that has ended well, and its JSON, before the client does. `called`: the tools that are known to the model by
        another name, by that name."""
        self.response = response
        """The response; it has no output until the end."""
        self._unique = unique
        self._keep = keep
        self._called = called
        self._items: list[OutputItem] = []
        self._open: _OpenItem | None = None
        self._content = 0
        """The count of characters in all messages."""
        self._sequence = 0
        self._events: list[bytes] = []

    def first_events(self, usage: Usage) -> list[bytes]:  # noqa: ARG002  other APIs begin with it
        """Return the first events; none if `silence_events` has returned them."""
        return [] if self._sequence else self.silence_events()

    def silence_events(self) -> list[bytes]:
        """Return what can be sent while nothing comes: the first events, once. They depend on no text."""
        if self._sequence:
            return []
        self._say(events.ResponseCreated(self.response, self._sequence))
        self._say(events.ResponseInProgress(self.response, self._sequence))
        return self._said()

    def push(self, delta: Delta) -> list[bytes]:
        """Add a delta to the response; return the events that follow."""
        if delta.reasoning:
            self._grow(self._text_item(OutputThought), delta.reasoning)
        text = delta.text
        for piece in delta.calls:
            if piece.name:
                before = piece.content_before - self._content
                self._say_text(text[:before])
                text = text[before:]
                tool = self._called.get(piece.name) or CalledTool(piece.name)
                kind, prefix = (OutputCustomCall, "ctc") if piece.custom else (OutputCall, "fc")
                self._begin(kind(self._name(prefix), piece.id, tool.name, "", "in_progress", tool.namespace))
            if piece.arguments:
                assert self._open is not None, "a call's first piece begins it"
                self._grow(self._open, piece.arguments)
        self._say_text(text, delta.entries)
        return self._said()

    def last_events(self, ended: Ended) -> list[bytes]:
        """End the response, and return the events that follow."""
        self._end(ended)
        return self._said()

    def full_body(self, delta: Delta, ended: Ended) -> bytes:
        """Return the response whose whole text is `delta`."""
        self.push(delta)
        return self._end(ended)

    def _end(self, ended: Ended) -> bytes:
        """End the response; return it as JSON."""
        cut = ended.finish == "length"
        if not self._items and self._open is None:
            self._text_item(OutputMessage)  # an empty answer is a message too
        self._close("incomplete" if cut else _DONE)
        self.response = replace(
            self.response,
            status="incomplete" if cut else _DONE,
            completed_at=None if cut else ended.at,
            incomplete_details=events.IncompleteDetails("max_output_tokens") if cut else None,
            output=self._items,
            usage=events.ResponseUsage.of(ended.usage, ended.reasoning_tokens),
        )
        last = events.ResponseIncomplete if cut else events.ResponseCompleted
        self._say(last(self.response, self._sequence))
        payload = _encode(self.response)
        self._keep(self.response, payload)
        return payload

    def error(self, status: int, message: str) -> bytes:
        """End the response with an error of that HTTP status; return the last event."""
        error = events.ResponseError("rate_limit_exceeded" if status == 429 else "server_error", message)
        if self._open is not None:
            self._items.append(self._open.whole("incomplete"))
            self._open = None
        self.response = replace(self.response, status="failed", error=error, output=self._items)
        self._say(events.ResponseFailed(self.response, self._sequence))
        return self._said()[0]

    # --- the fast path

    def continuation(self, delta: Delta) -> bytes | None:
        """Return the event of a delta that only continues the open item; None for others, which are to be pushed."""
        grown, text, calls = self._open, delta.text, delta.calls
        if grown is None or delta.entries:
            return None
        kind = type(grown.item)
        if text:
            return self._event(grown.plain, text) if kind is OutputMessage and not (calls or delta.reasoning) else None
        if delta.reasoning:
            return self._event(grown.plain, delta.reasoning) if kind is OutputThought and not calls else None
        if len(calls) == 1 and not calls[0].name and kind in (OutputCall, OutputCustomCall):
            return self._event(grown.plain, calls[0].arguments)
        return None

    def continued(self, delta: Delta) -> None:
        """Record that the `continuation` of a delta was sent."""
        assert self._open is not None
        self._open.pieces.append(delta.text or delta.reasoning or delta.calls[0].arguments)
        self._content += len(delta.text)
        self._sequence += 1

    # --- items

    def _text_item(self, kind: type[OutputThought | OutputMessage]) -> _OpenItem:
        """Return the open item; if it is of another kind, begin one of this kind first."""
        if self._open is not None and type(self._open.item) is kind:
            return self._open
        prefix, part = ("rs", ThoughtText("")) if kind is OutputThought else ("msg", OutputText(""))
        item = kind(self._name(prefix), [], "in_progress")
        grown = self._begin(item)
        if grown.is_summary:
            self._say(events.SummaryPartAdded(item.id, grown.index, SummaryText(""), self._sequence))
        else:
            self._say(events.PartAdded(item.id, grown.index, part, self._sequence))
        return grown

    def _name(self, prefix: str) -> str:
        return f"{prefix}_{self._unique}-{len(self._items) + (self._open is not None)}"

    def _begin(self, item: OutputItem) -> _OpenItem:
        self._close(_DONE)
        self._open = _OpenItem(item, len(self._items), summed_up=self.response.reasoning.summary is not None)
        self._say(events.ItemAdded(item, self._open.index, self._sequence))
        return self._open

    def _close(self, status: Literal["completed", "incomplete"]) -> None:
        grown, self._open = self._open, None
        if grown is None:
            return
        index, item = grown.index, grown.whole(status)
        match item:
            case OutputMessage(content=[part]):
                self._say(events.TextDone(item.id, index, part.text, part.logprobs, self._sequence))
                self._say(events.PartDone(item.id, index, part, self._sequence))
            case OutputThought(summary=[summary]):
                self._say(events.SummaryDone(item.id, index, summary.text, self._sequence))
                self._say(events.SummaryPartDone(item.id, index, summary, self._sequence))
            case OutputThought(content=[thought]):
                self._say(events.ThoughtDone(item.id, index, thought.text, self._sequence))
                self._say(events.PartDone(item.id, index, thought, self._sequence))
            case OutputCustomCall():
                self._say(events.InputDone(item.id, index, item.input, self._sequence))
            case OutputCall():
                self._say(events.ArgumentsDone(item.id, index, item.name, item.arguments, self._sequence))
        self._items.append(item)
        self._say(events.ItemDone(item, index, self._sequence))

    def _say_text(self, text: str, entries: Sequence[LogprobEntry] = ()) -> None:
        if text or entries:
            self._grow(self._text_item(OutputMessage), text, entries)
            self._content += len(text)

    def _grow(self, grown: _OpenItem, text: str, entries: Sequence[LogprobEntry] = ()) -> None:
        lead = grown.plain
        if entries:
            logprobs = chat_logprobs(entries).content
            grown.logprobs += logprobs
            lead = b'%b,"logprobs":%b,"delta":' % (grown.head, _encode(logprobs))
        self._events.append(self._event(lead, text))
        grown.pieces.append(text)
        self._sequence += 1

    # --- bytes

    def _event(self, lead: bytes, text: str) -> bytes:
        return b'%b%b,"sequence_number":%d}' % (lead, _encode(text), self._sequence)

    def _say(self, event: events.ResponseEvent) -> None:
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
