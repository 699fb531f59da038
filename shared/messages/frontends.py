"""frontend → frontend: the latest requests of each, for the page at /ui; and a response that another frontend stores.
Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.messages.codec import Codec


class RequestWay(Struct, frozen=True):
    """How one request went through the services, as its frontend knows it: times and counts, and nothing of its text.

    Each time is in seconds after the request's body was complete. None if not yet, or never."""

    name: str
    """The first digits of the frontend's own part of the request's id: too few to read a stored response with."""
    model: str
    age_s: float
    """The time since the body was complete, in seconds."""
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    """The number of prompt tokens that were found in a cache; the first part of an attempt reports it."""
    cached_host_tokens: int = 0
    cached_disk_tokens: int = 0
    attempt: int = 0
    """The number of the current attempt, or of the last one. 0 if there is none yet."""
    instances: tuple[str, ...] = ()
    """The workers that were chosen, in this order; the latest few."""
    tokenised_s: float = 0.0
    selected_s: float | None = None
    """When a router had chosen a worker for the first attempt."""
    accepted_s: float | None = None
    """When a worker had accepted the request for the first time."""
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: str = ""
    """What ended it: stop, length, tool_calls, cancelled, or the kind of the error. A request by text ends as answered,
    or with the status of its answer if that is not 200. Empty if it runs."""


class RecentRequests(Struct, frozen=True):
    """The latest requests of one frontend, oldest first, and how many it has."""

    frontend: str
    arriving: int
    """The number of requests whose prompt is not tokenised yet."""
    running: int
    begun: int
    """The number of requests, since the frontend started, whose prompt was tokenised."""
    requests: list[RequestWay]


class Recall(Struct, frozen=True, tag="recall"):
    """Ask a frontend for a response that it stores. This counts as a use of the response."""

    response: str
    account: str
    """The name of the API key that asks for it. Empty if no keys are required."""
    what: Literal["conversation", "response"]


class Forget(Struct, frozen=True, tag="forget"):
    """Ask a frontend to delete a stored response."""

    response: str
    account: str


ResponseStoreRequest = Recall | Forget


class Recalled(Struct, frozen=True):
    """A piece of the answer; the pieces together are JSON."""

    found: bool
    """Whether the response is stored, and belongs to this account."""
    piece: bytes = b""


RESPONSE_STORE_REQUEST: Codec[ResponseStoreRequest] = Codec(ResponseStoreRequest, "question for a response")
RECENT_REQUESTS: Codec[RecentRequests] = Codec(RecentRequests, "recent requests")
RECALLED: Codec[Recalled] = Codec(Recalled, "piece of a response")
