"""NKeys of NATS: a user's Ed25519 key as text, and its signatures. Pure.

    seed          base32 of   [18 << 3 | kind >> 5] [kind << 3 & 255] [32 bytes] [CRC-16, little-endian]
    public key    base32 of   [kind] [32 bytes] [CRC-16, little-endian]          the kind of a user is 20 << 3

nats-py's own way needs the package `nkeys`, of which there is no wheel.
"""

from __future__ import annotations

import base64
import binascii

_SEED, _USER = 18 << 3, 20 << 3
_SEED_BYTES = 2 + 32 + 2


class NatsKey:
    """The key of a user. Raise ValueError if `seed` is not a user's seed; the error does not show it."""

    def __init__(self, seed: str) -> None:
        from nacl.signing import SigningKey  # imported here, since only users with NKeys need it

        try:
            raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
        except ValueError:
            raise ValueError("not base32") from None
        if len(raw) != _SEED_BYTES or raw[-2:] != _checksum(raw[:-2]):
            raise ValueError("cut short, or mistyped")
        if raw[0] & 0xF8 != _SEED or (raw[0] & 7) << 5 | raw[1] >> 3 != _USER:
            raise ValueError("not the seed of a user")
        self._key = SigningKey(raw[2:-2])

    @property
    def public(self) -> str:
        """The public key, as nats-server's settings have it."""
        body = bytes([_USER]) + bytes(self._key.verify_key)
        return base64.b32encode(body + _checksum(body)).decode()

    def sign(self, nonce: str) -> bytes:
        """Return the signature of a server's nonce, in base64."""
        return base64.b64encode(self._key.sign(nonce.encode()).signature)


def _checksum(body: bytes) -> bytes:
    return binascii.crc_hqx(body, 0).to_bytes(2, "little")
