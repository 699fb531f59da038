"""Users of NATS with keys: NKeys, and what `nsc` makes: an operator, an account, and a user's credentials, as JWTs."""

from __future__ import annotations

import base64
import binascii
import json
import time
from typing import Any

from nacl.signing import SigningKey

OPERATOR, ACCOUNT, USER = 14 << 3, 0, 20 << 3
"""The kinds of NKeys, as their first byte."""


def seed_of(key: SigningKey, kind: int) -> str:
    """Return the seed of a key as NATS writes it."""
    return _text(bytes([18 << 3 | kind >> 5, kind << 3 & 0xFF]) + bytes(key))


def public_of(key: SigningKey, kind: int) -> str:
    """Return the public key as NATS writes it."""
    return _text(bytes([kind]) + bytes(key.verify_key))


def credentials(account: SigningKey, user: SigningKey, *, lives_s: float = 600.0) -> str:
    """Return the text of a creds file of a user that the account has signed."""
    claims = {"exp": int(time.time() + lives_s), "nats": {"type": "user", "version": 2, **_UNLIMITED}}
    jwt = _jwt("test", public_of(user, USER), (account, ACCOUNT), claims)
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed_of(user, USER)}\n------END USER NKEY SEED------\n"
    )


def operator_settings(operator: SigningKey, account: SigningKey) -> str:
    """Return the settings of a nats-server whose operator has signed this one account."""
    theirs = {"nats": {"type": "operator", "version": 2}}
    ours = {"nats": {"type": "account", "version": 2, "limits": {**_UNLIMITED, **_ACCOUNT_UNLIMITED}}}
    own = _jwt("operator", public_of(operator, OPERATOR), (operator, OPERATOR), theirs)
    signed = _jwt("account", public_of(account, ACCOUNT), (operator, OPERATOR), ours)
    return f"operator: {own}\nresolver: MEMORY\nresolver_preload: {{ {public_of(account, ACCOUNT)}: {signed} }}\n"


_UNLIMITED = dict.fromkeys(("subs", "data", "payload"), -1)
_ACCOUNT_UNLIMITED = dict.fromkeys(("imports", "exports", "conn", "leaf"), -1)


def _jwt(name: str, subject: str, signer: tuple[SigningKey, int], claims: dict[str, Any]) -> str:
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    body = {"jti": name, "iat": int(time.time()), "iss": public_of(*signer), "name": name, "sub": subject, **claims}
    text = ".".join(_part(json.dumps(each).encode()) for each in (head, body))
    return f"{text}.{_part(signer[0].sign(text.encode()).signature)}"


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _text(body: bytes) -> str:
    return base64.b32encode(body + binascii.crc_hqx(body, 0).to_bytes(2, "little")).decode().rstrip("=")
