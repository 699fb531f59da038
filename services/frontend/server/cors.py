"""Decides which web pages of other origins may use the API (CORS, as in the Fetch standard). Pure.

CORS is off unless origins are set: answers then carry no such header, and browsers keep pages from reading them. There
are no cookies, and credentials are never allowed. A page of an origin that is not set can do nothing: it has no API
key, and if none is needed, shared/runtime/origin.py refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from services.frontend.protocol.errors import Failure, failure
from services.frontend.protocol.ignored_fields import IGNORED_HEADER
from shared.runtime.origin import ANY_ORIGIN

_HEADERS = re.compile(r"[a-z0-9-]{1,64}(, ?[a-z0-9-]{1,64}){0,63}", re.IGNORECASE)
_METHODS = ("GET", "POST", "DELETE")
_LIMITS = (f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens"))
_EXPOSED = ", ".join(("Retry-After", "X-Request-Id", IGNORED_HEADER, *_LIMITS))
"""Response headers that a page may read in addition to those that the standard always allows."""
NOT_ALLOWED = "origin_not_allowed"
"""The code of the refusal of a page."""
_MAX_AGE_S = 600
"""Seconds that a browser may cache the answer to a preflight."""


class Cors:
    """The CORS policy of one HTTP server. `origins` are those allowed; "*" allows any."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = ANY_ORIGIN in origins
        self._origins = frozenset(origins)

    def answer_headers(self, origin: str | None) -> dict[str, str]:
        """Return the CORS headers of any answer; `origin` is the request's header of that name."""
        if not self._origins:
            return {}
        allowed = ANY_ORIGIN if self._any else origin if origin in self._origins else None
        vary = {} if self._any else {"Vary": "Origin"}
        if allowed is None:
            return vary
        return {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": _EXPOSED, **vary}

    def is_preflight(self, method: str, headers: Mapping[str, str]) -> bool:
        """Return whether a request is a preflight: a browser asks what it may send. It carries no key."""
        possible = method == "OPTIONS" and bool(self._origins)
        return possible and "Origin" in headers and "Access-Control-Request-Method" in headers

    def preflight_headers(self, headers: Mapping[str, str]) -> dict[str, str] | Failure:
        """Return the headers to answer a preflight with, in addition to `answer_headers`; or a refusal."""
        if not self._any and headers["Origin"] not in self._origins:
            refused = "pages of this origin may not use the API: http.cors_origins does not list it"
            return failure(403, refused, "invalid_request_error", code=NOT_ALLOWED)
        if headers["Access-Control-Request-Method"] not in _METHODS:
            refused = f"Access-Control-Request-Method: pages may use {', '.join(_METHODS)}"
            return failure(403, refused, "invalid_request_error")
        asked = headers.get("Access-Control-Request-Headers", "")
        if asked and not _HEADERS.fullmatch(asked):
            refused = "Access-Control-Request-Headers: not a list of header names"
            return failure(403, refused, "invalid_request_error")
        # Allow whatever is named: clients have headers of their own (X-Stainless-Lang, …), and `*` does not include
        # Authorization.
        allowed = {"Access-Control-Allow-Headers": asked} if asked else {}
        return {
            "Access-Control-Allow-Methods": ", ".join(_METHODS),
            "Access-Control-Max-Age": str(_MAX_AGE_S),
            **allowed,
        }
