"""What a gateway sends to its picker, what else happens to a request, and what follows. Pure.

exchange.py takes the first two and returns the third; wire.py has the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Literal

from msgspec import Struct

from services.frontend.protocol.errors import Failure

DESTINATION = "x-gateway-destination-endpoint"
"""The header, and the key of `envoy.lb`, that has the chosen endpoints."""
SERVED = "x-gateway-destination-endpoint-served"
"""The header, or the key of `envoy.lb`, in which a gateway says what endpoint answered."""
REQUEST_ID = "x-request-id"
REASON = "x-headrace-dropped-reason"
"""The header of an answer in place of a server's that says why, in a line of ASCII."""

Phase = Literal["request", "response"]


class BodyMode(IntEnum):
    """How a gateway sends a body, by the numbers of Envoy's `ProcessingMode.BodySendMode`."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class BodyModes(Struct, frozen=True):
    """How a gateway sends both bodies."""

    request: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    response: BodyMode = BodyMode.FULL_DUPLEX_STREAMED


# --- what the gateway sends


class GatewayHeaders(Struct, frozen=True):
    """The headers of a request or of its answer, by their names in lower case."""

    phase: Phase
    headers: Mapping[str, str]
    ended: bool = False
    """Whether no body follows."""
    subset: tuple[str, ...] | None = None
    """The endpoints to choose among. None if the gateway does not say."""
    served: str = ""
    """The endpoint that answered. Empty if the gateway does not say."""
    modes: BodyModes = BodyModes()
    """If a gateway does not say how it sends bodies, it is taken for one with full duplex, as the protocol demands."""


class GatewayBody(Struct, frozen=True):
    """A whole body or a piece of one."""

    phase: Phase
    data: bytes
    ended: bool = False


class GatewayTrailers(Struct, frozen=True):
    """The trailers of a request or of its answer."""

    phase: Phase


GatewayMessage = GatewayHeaders | GatewayBody | GatewayTrailers

# --- what else happens


class EndpointsChosen(Struct, frozen=True):
    """Where the request goes: endpoints in the order in which the gateway tries them."""

    endpoints: tuple[str, ...]
    request_id: str
    """The request's name for its client."""


class ChoiceRefused(Struct, frozen=True):
    """The request goes nowhere."""

    failure: Failure
    reason: str
    request_id: str = ""
    """The request's name for its client."""


class TimeOver(Struct, frozen=True):
    """The time for the body is over, or later the request's deadline has passed."""


class PickerLeaves(Struct, frozen=True):
    """This process is about to end."""


ExchangeEvent = GatewayMessage | EndpointsChosen | ChoiceRefused | TimeOver | PickerLeaves

# --- what follows


class HeadersReply(Struct, frozen=True):
    """Let headers go on."""

    phase: Phase
    set_headers: Mapping[str, str] = {}
    destination: str = ""
    """The value for `envoy.lb`, too. Empty if the request does not get its destination with this."""
    unread_answer_to: BodyMode | None = None
    """The mode of the request's body, if the gateway is asked not to send the answer's."""


class BodyReply(Struct, frozen=True):
    """Let a body go on."""

    phase: Phase
    piece: bytes | None = None
    """The piece that goes on. None if the body that the gateway keeps does."""
    ended: bool = False
    set_headers: Mapping[str, str] = {}
    destination: str = ""


class TrailersReply(Struct, frozen=True):
    """Let trailers go on."""

    phase: Phase


class ImmediateReply(Struct, frozen=True):
    """Answer the client at once, in place of a server."""

    status: int
    headers: Mapping[str, str]
    body: bytes


GatewayReply = HeadersReply | BodyReply | TrailersReply | ImmediateReply


class ChooseEndpoint(Struct, frozen=True):
    """Choose where the request goes; EndpointsChosen or ChoiceRefused must follow."""

    headers: Mapping[str, str]
    body: bytes
    subset: tuple[str, ...] | None


class AnswerBegun(Struct, frozen=True):
    """A server's answer has begun."""

    served: str
    """The endpoint that answers. Empty if the gateway does not say."""
    has_text: bool
    """Whether its text is there, too. A stream's is not, and FirstText follows if the gateway shows it."""


class FirstText(Struct, frozen=True):
    """The answer's first text has come."""


class ReleaseEndpoint(Struct, frozen=True):
    """Free what was reserved, although the gateway has not said that the request has ended."""


class EndStream(Struct, frozen=True):
    """End the stream. The gateway goes on by itself."""

    fault: str = ""
    """What the gateway did wrong. Empty if it did nothing wrong."""


ExchangeAction = GatewayReply | ChooseEndpoint | AnswerBegun | FirstText | ReleaseEndpoint | EndStream
