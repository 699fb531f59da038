"""Which pages of other origins a browser may let ask (CORS, of the Fetch standard). Pure.

Off where no origin is set: the answer says nothing of it, and browsers keep pages from reading it. There are no
cookies here, so no page can use somebody's right without having his key, and credentials are never allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from services.frontend.config import ANY_ORIGIN
from services.frontend.protocol.errors import Failure, failure

_HEADERS = re.compile(r"[a-z0-9-]{1,64}(, ?[a-z0-9-]{1,64}){0,63}", re.IGNORECASE)
_METHODS = ("GET", "POST", "DELETE")
_EXPOSED = (
    *("Retry-After", "X-Request-Id"),
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
"""Headers of ours that a page may read, beside those that any page may."""
_MAX_AGE_S = 600
"""How long a browser may keep what it was told."""


class Cors:
    """What is allowed."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = ANY_ORIGIN in origins
        self._origins = frozenset(origins)

    def answer_headers(self, origin: str | None) -> dict[str, str]:
        """Of any answer; `origin` is the request's header."""
        if not self._origins:
            return {}
        if self._any:
            return {"Access-Control-Allow-Origin": ANY_ORIGIN, "Access-Control-Expose-Headers": ", ".join(_EXPOSED)}
        if origin not in self._origins or origin is None:
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": ", ".join(_EXPOSED),
            "Vary": "Origin",
        }

    def is_preflight(self, method: str, headers: Mapping[str, str]) -> bool:
        """Whether it is a preflight: a browser's question what it may ask, which bears no key."""
        wanted = "Origin" in headers and "Access-Control-Request-Method" in headers
        return method == "OPTIONS" and wanted and bool(self._origins)

    def preflight_headers(self, headers: Mapping[str, str]) -> dict[str, str] | Failure:
        """What the answer says beside `headers`, which any has; or a refusal."""
        if not self._any and headers["Origin"] not in self._origins:
            return failure(403, "pages of this origin may not ask", "invalid_request_error", code="origin_not_allowed")
        if headers["Access-Control-Request-Method"] not in _METHODS:
            return failure(403, f"pages may use {', '.join(_METHODS)}", "invalid_request_error")
        asked = headers.get("Access-Control-Request-Headers", "")
        if asked and not _HEADERS.fullmatch(asked):
            return failure(403, "Access-Control-Request-Headers cannot be read", "invalid_request_error")
        # Whatever it names, as clients have headers of their own (X-Stainless-Lang, …) and * does not stand for
        # Authorization.
        named = {"Access-Control-Allow-Headers": asked} if asked else {}
        return {"Access-Control-Allow-Methods": ", ".join(_METHODS), "Access-Control-Max-Age": str(_MAX_AGE_S), **named}
