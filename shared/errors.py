"""The errors that services raise.

HeadraceError
├── ConfigError            a setting is unknown, malformed or contradicts another
├── ProtocolError          bytes from another process do not follow the protocol
│   └── PayloadTooLarge    over the payload limit; carries size_bytes and limit_bytes
├── ModelError             a model cannot be served; the message names the file
├── NotFinite              a request makes the model compute numbers that are not finite, at any worker
├── InvalidRequest         the request is at fault (4xx); carries param and code
└── Unavailable            it does not work now, but may later (503); carries retry_after_s
    ├── BusDown            NATS cannot be reached
    ├── NoResponders       no process listens on the subject: the receiver is gone
    ├── RequestTimeout     no answer in time
    ├── DiscoveryDown      etcd cannot be reached
    └── Overloaded         a limit was reached (429)
        └── RateLimited    the limit of one API key; carries kind
"""

from __future__ import annotations

import msgspec

MALFORMED = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What msgspec raises for bytes or texts that are not what they should be. Its own error alone lacks texts that are not
UTF-8, and nesting that is too deep."""


class HeadraceError(Exception):
    """Any error this project raises on purpose."""


class ConfigError(HeadraceError):
    """A setting is unknown, malformed or contradicts another."""


class ProtocolError(HeadraceError):
    """Bytes from another process do not follow the protocol."""


class PayloadTooLarge(ProtocolError):
    """A payload is over the limit, and was not sent."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"payload of {size_bytes} bytes is over the limit of {limit_bytes}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class ModelError(HeadraceError):
    """A model cannot be served. The message names the file."""


class NotFinite(HeadraceError):
    """The model computes numbers that are not finite, for a request or always: another attempt would fail as well."""


class InvalidRequest(HeadraceError):
    """The request is at fault. `param` names the field; `code` is OpenAI's code, if there is one for the fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Unavailable(HeadraceError):
    """Something does not work now, but may work after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BusDown(Unavailable):
    """NATS cannot be reached."""


class NoResponders(Unavailable):
    """No process listens on the subject: the receiver is gone."""


class RequestTimeout(Unavailable):
    """No answer came in time."""


class DiscoveryDown(Unavailable):
    """The discovery back end cannot be reached."""


class Overloaded(Unavailable):
    """A limit was reached before any work was done."""


class RateLimited(Overloaded):
    """An API key has used up its limit for now. `kind` names the limit as OpenAI does: requests or tokens."""

    def __init__(self, message: str, *, kind: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.kind = kind
