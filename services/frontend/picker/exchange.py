"""One question of a gateway: the messages of its ext_proc stream in, replies and what else follows out. Pure.

    HEADERS ─▶ BODY ── its end ─▶ CHOOSING ── chosen ─▶ SENT ── the answer's headers ─▶ ANSWERING ── its end ─▶ ENDED
       │         │                 ▲    └── refused ─▶ ENDED                              ▲
       └─────────│── no body ──────┘                                                      │
                 └── the gateway answers by itself, such as with 413 ─────────────────────┘

When headers may go on depends on how the gateway sends the body of a request:

    buffered             they are answered at once; the reply to the body has the destination
    full duplex          nothing is answered before the whole body is here: then the headers with the destination,
                         and the body in pieces
    none or streamed     headers would be on their way before the body is known: the request is refused with 500

A message out of order ends the stream with a line that says which. The exchange keeps no more than one body, and after
the choice nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import assert_never

from services.frontend.picker.messages import (
    DESTINATION,
    REASON,
    REQUEST_ID,
    AnswerBegun,
    BodyMode,
    BodyModes,
    BodyReply,
    ChoiceRefused,
    ChooseEndpoint,
    EndpointsChosen,
    EndStream,
    ExchangeAction,
    ExchangeEvent,
    FirstText,
    GatewayBody,
    GatewayHeaders,
    GatewayMessage,
    GatewayTrailers,
    HeadersReply,
    ImmediateReply,
    PickerLeaves,
    ReleaseEndpoint,
    TimeOver,
    TrailersReply,
)
from services.frontend.protocol.errors import Failure, failure

REASON_CHARACTERS = 200
BODY_LIMIT_BYTES = 10 << 20
PIECE_BYTES = 62_000
"""Most bytes of a piece of a body that is sent back. Some gateways take no more than 64 KiB."""
_BUFFERED = (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)


class ExchangeState(Enum):
    HEADERS = "headers"
    BODY = "body"
    CHOOSING = "choosing"
    SENT = "sent"
    ANSWERING = "answering"
    ENDED = "ended"


class Exchange:
    """The state machine of one stream."""

    def __init__(self, limit_bytes: int = BODY_LIMIT_BYTES) -> None:
        """`limit_bytes` is the most of a body."""
        self._limit_bytes = limit_bytes
        self.state = ExchangeState.HEADERS
        self._headers: Mapping[str, str] = {}
        self._subset: tuple[str, ...] | None = None
        self._modes = BodyModes()
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        self._bodiless = False
        """Whether the request has no body."""
        self._trailers = False
        """Whether the request's trailers came before its headers went on."""
        self._request_id = ""
        self._text_due = False
        """Whether the answer's first text would be news."""
        self._leaving = False
        """Whether the stream ends as soon as the gateway can go on without it."""

    @property
    def size_bytes(self) -> int:
        """The bytes of the body that are kept."""
        return self._size_bytes

    @property
    def passes_answer(self) -> bool:
        """Whether the request is on its way, and the text of its answer goes through here. Its gateway ends the stream,
        once it has all of that."""
        held = (ExchangeState.SENT, ExchangeState.ANSWERING, ExchangeState.ENDED)
        return self._modes.response is BodyMode.FULL_DUPLEX_STREAMED and self.state in held

    def on(self, event: ExchangeEvent) -> list[ExchangeAction]:
        """Apply an event and return the actions that follow, in order."""
        self._leaving |= isinstance(event, PickerLeaves)
        actions = self._follow(event)
        if self._leaving and not self.passes_answer and not any(isinstance(action, EndStream) for action in actions):
            actions += self._leave()
        return actions

    def _follow(self, event: ExchangeEvent) -> list[ExchangeAction]:
        match event:
            case GatewayHeaders() | GatewayBody() | GatewayTrailers():
                return self._on_message(event)
            case EndpointsChosen():
                assert self.state is ExchangeState.CHOOSING
                return self._on_chosen(event)
            case ChoiceRefused():
                self._request_id = event.request_id
                return self._refuse(event.failure, event.reason)
            case TimeOver():
                return self._on_time_over()
            case PickerLeaves():
                return []
            case _:
                assert_never(event)

    def _on_message(self, message: GatewayMessage) -> list[ExchangeAction]:
        state = self.state
        match message:
            case GatewayHeaders(phase="request") if state is ExchangeState.HEADERS:
                return self._on_request_headers(message)
            case GatewayBody(phase="request") if state is ExchangeState.BODY:
                return self._on_request_body(message)
            case GatewayBody(phase="request") if self._has_whole_body:
                return self._on_more_body(message)
            case GatewayTrailers(phase="request") if state is ExchangeState.BODY:
                if self._modes.request in _BUFFERED:  # it would take no destination with them
                    why = "trailers without a body"
                    return self._refuse(failure(400, why, "invalid_request_error", code="picker_trailers"), why)
                self._trailers = True
                return self._choose()
            case GatewayTrailers(phase="request") if state is not ExchangeState.HEADERS:
                return [TrailersReply("request")]
            case GatewayHeaders(phase="response") if state in (ExchangeState.BODY, ExchangeState.SENT):
                return self._on_answer(message)
            case GatewayBody(phase="response") if state is ExchangeState.ANSWERING:
                return self._on_answer_body(message)
            case GatewayTrailers(phase="response") if state is ExchangeState.ANSWERING:
                self.state = ExchangeState.ENDED
                return [TrailersReply("response")]
            case _:
                return self._out_of_order(message)

    def _out_of_order(self, message: GatewayMessage) -> list[ExchangeAction]:
        what, state = f"{message.phase} {type(message).__name__.removeprefix('Gateway').lower()}", self.state
        self._end()
        return [EndStream(f"the gateway sent {what} out of order, in the state {state.value}")]

    # --- the request

    def _on_request_headers(self, message: GatewayHeaders) -> list[ExchangeAction]:
        self._headers, self._subset, self._modes = message.headers, message.subset, message.modes
        if message.ended:
            self._bodiless = True
            return self._choose()
        mode = self._modes.request
        if mode is BodyMode.FULL_DUPLEX_STREAMED:
            self.state = ExchangeState.BODY
            return []
        if mode in _BUFFERED:
            self.state = ExchangeState.BODY
            unread = mode if self._asks_for_no_answer else None
            return [HeadersReply("request", unread_answer_to=unread)]
        why = f"the gateway's request_body_mode is {mode.name}; set BUFFERED or FULL_DUPLEX_STREAMED for this route"
        return self._refuse(failure(500, why, "server_error", code="picker_mode"), why)

    @property
    def _asks_for_no_answer(self) -> bool:
        """Whether the gateway would send the answer's body without need, and may be asked not to."""
        return self._modes.response not in (BodyMode.NONE, BodyMode.FULL_DUPLEX_STREAMED)

    def _on_request_body(self, message: GatewayBody) -> list[ExchangeAction]:
        self._size_bytes += len(message.data)
        if self._size_bytes > self._limit_bytes:
            why = f"the body has more than {self._limit_bytes} bytes"
            return self._refuse(failure(413, why, "invalid_request_error", code="request_too_large"), why)
        self._pieces.append(message.data)
        # A buffered body is one message. Without an end, trailers follow it, or what the gateway had no room for.
        whole = message.ended or self._modes.request in _BUFFERED
        return self._choose() if whole else []

    @property
    def _has_whole_body(self) -> bool:
        """Whether the end of the body was here."""
        before = self.state in (ExchangeState.HEADERS, ExchangeState.BODY)
        return not (before or self._bodiless or self._trailers)

    def _on_more_body(self, message: GatewayBody) -> list[ExchangeAction]:
        """Let what comes after the end go on as it is: after other filters Envoy sends a buffered body in two messages,
        of which each awaits its reply, and with full duplex it repeats the last one of a large body."""
        if self._modes.request in _BUFFERED and self.state is not ExchangeState.CHOOSING:
            return [BodyReply("request")]
        if self._modes.request is BodyMode.FULL_DUPLEX_STREAMED and message.ended:
            return []
        return self._out_of_order(message)

    def _choose(self) -> list[ExchangeAction]:
        self.state = ExchangeState.CHOOSING
        body = b"".join(self._pieces)
        self._pieces = [body]
        return [ChooseEndpoint(self._headers, body, self._subset)]

    def _on_chosen(self, chosen: EndpointsChosen) -> list[ExchangeAction]:
        destination = ",".join(chosen.endpoints)
        headers = {DESTINATION: destination}
        if REQUEST_ID not in self._headers:
            headers[REQUEST_ID] = chosen.request_id
        self._request_id = chosen.request_id
        [body] = self._pieces
        self._forget_body()
        self.state = ExchangeState.SENT
        if self._modes.request in _BUFFERED and not self._bodiless:
            return [BodyReply("request", None, False, headers, destination)]
        replies: list[ExchangeAction] = [HeadersReply("request", headers, destination)]
        if not self._bodiless:
            starts = range(0, max(1, len(body)), PIECE_BYTES)
            last = starts[-1]
            replies += [
                BodyReply("request", body[at : at + PIECE_BYTES], at == last and not self._trailers) for at in starts
            ]
        if self._trailers:
            replies.append(TrailersReply("request"))
        return replies

    def _refuse(self, failed: Failure, why: str) -> list[ExchangeAction]:
        self._end()
        reason = "".join(one for one in why if " " <= one <= "~")[:REASON_CHARACTERS]
        headers = {"content-type": "application/json", REASON: reason, **failed.headers}
        if name := self._headers.get(REQUEST_ID, self._request_id):
            headers[REQUEST_ID] = name
        return [ImmediateReply(failed.status, headers, failed.payload), EndStream()]

    # --- the answer

    def _on_answer(self, message: GatewayHeaders) -> list[ExchangeAction]:
        sent = self.state is ExchangeState.SENT
        self._forget_body()
        self.state = ExchangeState.ENDED if message.ended else ExchangeState.ANSWERING
        headers = {REQUEST_ID: self._request_id} if sent and REQUEST_ID not in message.headers else {}
        reply = HeadersReply("response", headers)
        if not sent:  # the gateway's own answer to a request that it did not send on
            return [reply]
        streamed = message.headers.get("content-type", "").startswith("text/event-stream")
        self._text_due = streamed
        return [AnswerBegun(message.served, has_text=not streamed), reply]

    def _on_answer_body(self, message: GatewayBody) -> list[ExchangeAction]:
        actions: list[ExchangeAction] = []
        if self._text_due and message.data:
            self._text_due = False
            actions.append(FirstText())
        if message.ended:
            self.state = ExchangeState.ENDED
        if self._modes.response is BodyMode.FULL_DUPLEX_STREAMED:
            actions.append(BodyReply("response", message.data, message.ended))
        else:
            actions.append(BodyReply("response"))
        return actions

    # --- the end

    def _on_time_over(self) -> list[ExchangeAction]:
        if self.state in (ExchangeState.HEADERS, ExchangeState.BODY):
            why = "the gateway did not send the whole request in time"
            return self._refuse(failure(408, why, "invalid_request_error", code="request_timeout"), why)
        return [ReleaseEndpoint(), *self._leave()]

    def _leave(self) -> list[ExchangeAction]:
        """End the stream, if the gateway can go on without it: the request is on its way, and no answer goes through
        here."""
        passing = self.passes_answer and self.state is not ExchangeState.ENDED
        if passing or self.state in (ExchangeState.HEADERS, ExchangeState.BODY, ExchangeState.CHOOSING):
            return []
        self._end()
        return [EndStream()]

    def _end(self) -> None:
        self._forget_body()
        self.state = ExchangeState.ENDED

    def _forget_body(self) -> None:
        self._pieces, self._size_bytes = [], 0

    def validate(self) -> None:
        """Assert the invariants."""
        assert sum(map(len, self._pieces)) == self._size_bytes <= self._limit_bytes
        kept = (ExchangeState.BODY, ExchangeState.CHOOSING)
        assert self.state in kept or not self._pieces
        assert self.state is ExchangeState.CHOOSING or not self._bodiless or not self._pieces
        assert not self._text_due or self.state in (ExchangeState.ANSWERING, ExchangeState.ENDED)
