"""TLS between kvbms: each side shows a certificate, and believes those of one authority.

The files are read at the start. A certificate that is renewed needs a new start of kvbm.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from msgspec import Struct

from services.kvbm.config import PeersConfig
from shared.errors import ConfigError, ModelError
from shared.model_file import read_model_file

FILE_LIMIT_BYTES = 1 << 20
"""The maximum size of a file with a certificate, a key or authorities."""


class PeerTls(Struct, frozen=True):
    """The TLS contexts for both directions."""

    lender: ssl.SSLContext
    reader: ssl.SSLContext


def peer_tls(config: PeersConfig) -> PeerTls | None:
    """Return the contexts; None if the settings name no certificate. Raise ConfigError."""
    if not config.tls_cert:
        return None
    cert, key, authority = Path(config.tls_cert), Path(config.tls_key), Path(config.tls_ca)
    for name, path in (("tls_cert", cert), ("tls_key", key), ("tls_ca", authority)):
        try:
            read_model_file(path, FILE_LIMIT_BYTES)
        except ModelError as wrong:
            raise ConfigError(f"peers.{name}: {wrong}") from None
    made = PeerTls(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    for context in (made.lender, made.reader):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the authority is the fleet's own; PeerHello says which kvbm it is
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(cert, key, password=lambda: "")
            context.load_verify_locations(authority)
        except (ssl.SSLError, ValueError) as wrong:
            raise ConfigError(f"peers.tls_cert {cert}, tls_key {key}, tls_ca {authority}: {wrong}") from None
        except OSError as wrong:
            raise ConfigError(f"peers.tls_cert {cert}, tls_key {key}, tls_ca {authority}: {wrong.strerror}") from None
    return made
