"""What a request comes with beside its body, whichever door it came through."""

from __future__ import annotations

import re
import secrets

from msgspec import Struct

from services.frontend.requests.admission import Permit

_PLAIN = re.compile(r"[0-9A-Za-z._:-]{1,64}")


class RequestId(Struct, frozen=True):
    """The name of a request."""

    unique: str
    """In the logs and messages of all services."""
    shown: str
    """To its client."""


def request_id(given: str = "") -> RequestId:
    """`given` is the client's own name for it, not unique and perhaps unfit: then it is passed over."""
    own = secrets.token_hex(16)  # not to be guessed: where no keys are asked for, a response is his who knows its id
    return RequestId(f"{given}-{own}", given) if _PLAIN.fullmatch(given) else RequestId(own, own)


class RequestContext(Struct, frozen=True):
    """One request's, while it is answered."""

    id: RequestId
    permit: Permit
    """With the account of its key."""
    received_s: float
    """When its body was there, on the loop's clock."""
    deadline_header: str | None = None
