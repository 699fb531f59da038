"""What a request comes with beside its body, whichever door it came through."""

from __future__ import annotations

import re
import secrets
from typing import Literal, get_args

from msgspec import Struct

from services.frontend.requests.admission import Place

Operation = Literal[
    "chat", "completions", "embeddings", "responses", "retrieve_response", "delete_response", "tokenize", "detokenize"
]
"""What a body asks for. Over NATS it is the last word of the subject."""
PATHS: dict[Operation, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
"""Where it is asked over HTTP, with POST."""
KEPT_RESPONSE = "/v1/responses/{response_id}"
KEPT: dict[Operation, str] = {"retrieve_response": "GET", "delete_response": "DELETE"}
"""What is asked there, and with which method: what the path and the query say is the body that it has over NATS."""
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
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


class Asking(Struct, frozen=True):
    """One request's, while it is answered."""

    named: RequestId
    place: Place
    """With the account of its key."""
    begun: float
    """When its body was there, on the loop's clock."""
    deadline_header: str | None = None
