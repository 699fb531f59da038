"""The errors services raise at one another.

HeadraceError
├── ConfigError            a setting is unknown, malformed or contradicts another
├── ProtocolError          bytes on the wire that are not what was agreed
│   └── PayloadTooLarge    over the payload limit; carries size_bytes and limit_bytes
├── ModelError             a model directory or file that cannot be served; names the file
├── NotFinite              the model's numbers overflow on a request, at any worker
├── InvalidRequest         the client's fault (4xx); carries param and code
└── Unavailable            not now, perhaps later (503); carries retry_after_s
    ├── BusDown            NATS cannot be reached
    ├── NoResponders       nobody listens on the subject: the addressee is gone
    ├── RequestTimeout     no answer in time
    ├── DiscoveryDown      etcd cannot be reached
    └── Overloaded         a bound was reached (429)
        └── RateLimited    the client's own one; carries kind
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Any error this project raises on purpose."""


class ConfigError(HeadraceError):
    """A setting is unknown, malformed or contradicts another."""


class ProtocolError(HeadraceError):
    """Bytes on the wire that are not what was agreed."""


class PayloadTooLarge(ProtocolError):
    """A payload over the limit; it was not sent."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"payload of {size_bytes} bytes is over the limit of {limit_bytes}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class ModelError(HeadraceError):
    """A model that cannot be served; the message names the file."""


class NotFinite(HeadraceError):
    """The model's numbers overflow on a request, or it is broken: another try would fail as well."""


class InvalidRequest(HeadraceError):
    """The client's fault. `param` names the field, `code` is OpenAI's word for it where there is one."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Unavailable(HeadraceError):
    """Not now, perhaps after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BusDown(Unavailable):
    """NATS cannot be reached."""


class NoResponders(Unavailable):
    """Nobody listens on the subject: the addressee is gone."""


class RequestTimeout(Unavailable):
    """No answer in time."""


class DiscoveryDown(Unavailable):
    """The discovery back end cannot be reached."""


class Overloaded(Unavailable):
    """A bound was reached before any work was done."""


class RateLimited(Overloaded):
    """A key has had what it may have for now. `kind` says of what, as OpenAI does: requests or tokens."""

    def __init__(self, message: str, *, kind: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.kind = kind
