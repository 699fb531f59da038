"""The salt of a request's cached blocks, made of what its key and its client say. Pure.

    the key's `salt`      the header X-Cache-Salt      the field `cache_salt`
          │                         └────── the client's ──────┘
          └──────────── joined: SHA-256 of both, each with its length ──▶ the salt that routers, engines and kvbm get

Requests share cached blocks only if their salts are equal. A client must not be able to write down a joined salt as its
own: all joined ones begin with JOINED, and a client's salt that begins so is joined, too, as one of its kind.
"""

from __future__ import annotations

import hashlib

from services.frontend.auth.accounts import Account

OWN_SALT = "own"
"""The value of a key's `salt` that stands for the key's name."""
JOINED = "headrace:"
"""How a joined salt begins."""


def cache_salt(account: Account | None, header: str, field: str) -> str:
    """Return the salt of a request; empty if there is none. `header` and `field` are the client's, empty if missing."""
    salt = header or field
    if header and field:
        salt = _joined("both", header, field)  # a proxy may set the header, so the field must not replace it
    elif salt.startswith(JOINED):
        salt = _joined("client", salt)
    of_key = None if account is None else account.entry.salt
    if account is None or of_key is None:
        return salt
    return _joined("key", account.name, salt) if of_key == OWN_SALT else _joined("keys", of_key, salt)


def _joined(*parts: str) -> str:
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in (one.encode() for one in parts))
    return JOINED + hashlib.sha256(framed).hexdigest()
