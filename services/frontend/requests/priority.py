"""How early a request is served: what its client asks for, within what its API key may ask for. Pure.

the body's `priority`            lower is served earlier, as in vLLM; 0 if the client says nothing
Select, Generate and Submit      higher is served earlier: the negative of it

A value that is too early is refused, not raised: its client would never learn why it waits. Nothing ages;
`limits.wait_s` bounds the wait of what no worker has begun.
"""

from __future__ import annotations

from services.frontend.auth.accounts import Account
from services.frontend.protocol.errors import field_error

FIELD = "priority"
NOT_ALLOWED = "priority_not_allowed"
"""The code of the error about a priority that the client may not ask for."""


def lowest_allowed(account: Account | None, default: int) -> int:
    """Return the lowest value of the field that a client may send: that of its key, or the default."""
    own = None if account is None else account.entry.min_priority
    return default if own is None else own


def served_priority(asked: int | None, lowest: int) -> int:
    """Return a request's priority as routers and workers count it. A client that asks for none gets 0, or the best that
    it may have. Raise InvalidRequest if it asks for a better one than it may have."""
    if asked is None:
        return -max(0, lowest)
    if asked < lowest:
        why = f"{asked} is lower than {lowest}, the lowest that you may ask for; lower is served earlier"
        raise field_error(FIELD, why, NOT_ALLOWED)
    return -asked
