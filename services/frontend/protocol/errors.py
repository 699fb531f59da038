"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}} and an HTTP status."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from shared import errors
from shared.errors import HeadraceError, InvalidRequest


class Error(Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    """The field or header that is wrong."""
    code: str | None


class ErrorBody(Struct, frozen=True):
    """The body of a failure."""

    error: Error


class Failure(Struct, frozen=True):
    """The HTTP response that a client gets in place of an answer."""

    status: int
    payload: bytes
    """The body, as JSON."""
    retry_after_s: int | None = None
    """Seconds until a retry makes sense, at least 1. None if a retry would not change the result."""

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers, except the content type."""
        headers = _REQUIRED_HEADERS.get(self.status, {})
        return dict(headers) if self.retry_after_s is None else {**headers, "Retry-After": str(self.retry_after_s)}


_REQUIRED_HEADERS: Mapping[int, Mapping[str, str]] = {
    401: {"WWW-Authenticate": "Bearer"},
    415: {"Accept-Encoding": "identity"},
}
"""The header that RFC 9110 requires with a status."""


def failure(status: int, message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Failure:
    """Make a failure; `kind` is OpenAI's `type`."""
    return Failure(status, msgspec.json.encode(ErrorBody(Error(message, kind, param, code))))


def failure_of(error: HeadraceError) -> Failure:
    """Turn an error into the failure that a client gets."""
    text = str(error)
    match error:
        case InvalidRequest():
            return failure(error.status, text, "invalid_request_error", param=error.param, code=error.code)
        case errors.PayloadTooLarge():
            return failure(413, text, "invalid_request_error", code="request_too_large")
        case errors.RequestTimeout():
            return failure(504, text, "timeout_error", code="deadline_exceeded")
        case errors.RateLimited():
            wrong = failure(429, text, error.kind, code="rate_limit_exceeded")
        case errors.Overloaded():
            wrong = failure(429, text, "rate_limit_error", code="overloaded")
        case errors.Unavailable():
            wrong = failure(503, text, "service_unavailable_error", code="unavailable")
        case _:
            return failure(500, text, "server_error")
    return msgspec.structs.replace(wrong, retry_after_s=max(1, math.ceil(error.retry_after_s)))


UNSUPPORTED = "unsupported_parameter"
"""The code of an error about a field, a value or a combination that is not supported."""


def field_error(field: str, why: str, code: str | None = None, status: int = 400) -> InvalidRequest:
    """Return the error about a field or a header of a request; its message begins with the name."""
    return InvalidRequest(f"{field}: {why}", param=field, code=code, status=status)
