"""What belongs to a request in addition to its body, over HTTP and over NATS."""

from __future__ import annotations

import re
import secrets

from msgspec import Struct, field

from services.frontend.protocol.errors import field_error
from services.frontend.protocol.ignored_fields import IGNORED_HEADER, IgnoredFields
from services.frontend.requests.admission import Permit
from services.frontend.requests.request_trace import RequestTrace

SESSION_HEADER = "X-Session-Id"
"""The header, over HTTP and over NATS, that names the conversation to which a request belongs."""
SESSION_LIMIT_CHARACTERS = 256
"""Routers refuse a longer name."""

_PLAIN = re.compile(r"[0-9A-Za-z._:-]{1,64}")


class RequestId(Struct, frozen=True):
    """The two names of a request."""

    unique: str
    """The name in the logs and messages of all services."""
    shown: str
    """The name that its client sees."""


def request_id(given: str = "") -> RequestId:
    """Return the names of a new request. `given` is the client's own name for it, not unique; it is ignored unless it
    is short and plain."""
    # Unguessable: without API keys, a response's id is all that one needs to read it.
    own = secrets.token_hex(16)
    return RequestId(f"{given}-{own}", given) if _PLAIN.fullmatch(given) else RequestId(own, own)


def ignored_header(ignored: IgnoredFields) -> dict[str, str]:
    """Return the header of an answer that names the fields of the request without effect, if there are any."""
    return {IGNORED_HEADER: ", ".join(ignored.names)} if ignored.names else {}


def session_name(header: str | None) -> str:
    """Return the name of a conversation that the header gives; empty if there is none. Raise InvalidRequest."""
    name = (header or "").strip()
    if len(name) > SESSION_LIMIT_CHARACTERS or not name.isprintable():
        raise field_error(SESSION_HEADER, f"must be at most {SESSION_LIMIT_CHARACTERS} printable characters")
    return name


class RequestContext(Struct, frozen=True):
    """The context of one request while it is answered."""

    id: RequestId
    permit: Permit
    """What it has of the frontend's limits, and the account of its key."""
    received_s: float
    """When its body was complete, on the loop's clock."""
    deadline_header: str | None = None
    session: str = ""
    """The name of its conversation, of the header; empty: the body may name it."""
    lowest_priority: int = 0
    """The lowest `priority` that its body may ask for."""
    trace: RequestTrace | None = None
    """The request's trace; None: it is not traced."""
    ignored: IgnoredFields = field(default_factory=IgnoredFields)
    """The fields of its body that have no effect."""
