"""What belongs to a request in addition to its body, such as `X-Request-Id`, over HTTP and over NATS."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from msgspec import Struct, field

from services.frontend.auth.accounts import cache_salt
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.ignored_fields import IGNORED_HEADER, IgnoredFields
from services.frontend.requests.admission import Permit
from services.frontend.requests.request_trace import RequestTrace
from services.frontend.serving.reply import Opening

SESSION_HEADER = "X-Session-Id"
"""The header, over HTTP and over NATS, that names the conversation to which a request belongs."""
SALT_HEADER = "X-Cache-Salt"
"""The header, over HTTP and over NATS, that separates a request's cached blocks, as the field `cache_salt` does."""
NAME_LIMIT_CHARACTERS = 256
"""Characters of these headers at most. Routers and workers refuse longer names."""

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
    return _name(SESSION_HEADER, header)


def header_salt(header: str | None) -> str:
    """Return the salt of cached blocks that the header gives; empty if there is none. Raise InvalidRequest."""
    return _name(SALT_HEADER, header)


def _name(header: str, given: str | None) -> str:
    name = (given or "").strip()
    if len(name) > NAME_LIMIT_CHARACTERS or not name.isprintable():
        raise field_error(header, f"must be at most {NAME_LIMIT_CHARACTERS} printable characters")
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
    """The name of its conversation, of the header. Empty if the body may name it."""
    salt_header: str = ""
    """The salt of its cached blocks that the header gives; empty if it is missing."""
    lowest_priority: int = 0
    """The lowest `priority` that its body may ask for."""
    trace: RequestTrace | None = None
    """The request's trace. None if it is not traced."""
    ignored: IgnoredFields = field(default_factory=IgnoredFields)
    """The fields of its body that have no effect."""
    announce: Callable[[Opening], None] = lambda _: None
    """Is called once its body is decoded, if it asks for a stream."""

    def salt(self, field: str | None) -> str:
        """Return the salt of its cached blocks; empty if there is none. `field` is that of its body."""
        return cache_salt(self.permit.account, self.salt_header, field or "")
