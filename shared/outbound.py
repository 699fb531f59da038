"""How HTTP servers that are not ours are reached: at one address of their name, over TLS, and why one is not."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from aiohttp import AddrInfoType
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from shared.errors import ConfigError
from shared.regular_file import read_regular_file

FILE_LIMIT_BYTES = 4 << 20
"""Most bytes of a file with certificates or a key: a system's bundle of authorities has 0.2 MB."""
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""After 10 s of silence the kernel asks the other side three times, once in 5 s."""
_UNKNOWN_AUTHORITY = (18, 19, 20, 21)
"""OpenSSL's codes of a certificate that nothing trusted has signed."""


class TlsFiles(Struct, frozen=True):
    """The PEM files of TLS towards a server; each is empty if there is none."""

    ca_file: str = ""
    """The authorities that are believed, in place of the system's."""
    client_cert: str = ""
    client_key: str = ""


class TlsNames(Struct, frozen=True):
    """What the files of a TlsFiles are called where they are set."""

    ca_file: str
    client_cert: str
    client_key: str


class FixedAddress(AbstractResolver):
    """Leads every name to one address. The name stays what requests and TLS name, and what a certificate must be of."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [ResolveResult(hostname=host, host=self._address, port=port, family=family, proto=0, flags=flags)]

    async def close(self) -> None:
        pass


def open_connector(
    address: str, tls: ssl.SSLContext | None, *, most: int = 100, idle_s: float = 15.0
) -> aiohttp.TCPConnector:
    """Return what makes at most this many connections: to an address, or if it is empty to those of the URL's host.
    Without `tls` the system's authorities are believed. A connection that was idle for `idle_s` is not used again."""
    return aiohttp.TCPConnector(
        limit=most,
        resolver=FixedAddress(address) if address else None,
        ssl=True if tls is None else tls,
        keepalive_timeout=idle_s,
        socket_factory=open_socket,
    )


def open_socket(place: AddrInfoType) -> socket.socket:
    """Return a socket for a connection that ends by itself some 25 s after the other machine has gone without a word:
    one that waits for an answer would wait for ever."""
    opened = socket.socket(*place[:3])
    for level, option, value in KEEP_ALIVE:
        opened.setsockopt(level, option, value)
    return opened


def read_tls(files: TlsFiles, names: TlsNames, *, protocols: Sequence[str] = ("http/1.1",)) -> ssl.SSLContext | None:
    """Return the TLS towards servers; None without files. `protocols` are offered over ALPN. Raise ConfigError in the
    words of `names`."""
    if files == TlsFiles():
        return None
    if bool(files.client_cert) != bool(files.client_key):
        raise ConfigError(f"{names.client_cert}, {names.client_key}: a certificate and its key need each other")
    authorities, *_ = [_read(getattr(files, name), getattr(names, name)) for name in TlsFiles.__struct_fields__]
    text = authorities.decode("ascii", "ignore")  # the comments of a bundle may be in any language
    try:
        context = ssl.create_default_context(cadata=(text or "empty") if files.ca_file else None)
    except ssl.SSLError:
        raise ConfigError(f"{names.ca_file} {files.ca_file}: no certificates in PEM") from None
    if protocols:
        context.set_alpn_protocols(list(protocols))
    if files.client_cert:
        try:
            context.load_cert_chain(files.client_cert, files.client_key, password=lambda: "")
        except (OSError, ValueError) as wrong:
            why = getattr(wrong, "reason", None) or "no certificate and key in PEM, without a passphrase"
            where = f"{names.client_cert} {files.client_cert}, {names.client_key} {files.client_key}"
            raise ConfigError(f"{where}: {_words(why)}") from None
    return context


def read_key(path: str, place: str) -> str:
    """Return the API key in a file; empty without a path. Raise ConfigError, which begins with `place`."""
    if not path:
        return ""
    try:
        key = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as wrong:
        raise ConfigError(f"{place}: {getattr(wrong, 'strerror', None) or 'not ASCII'}") from None
    if not key or len(key.split()) > 1:
        raise ConfigError(f"{place}: not one line with a key")
    return key


def describe_fault(wrong: BaseException, ca_name: str) -> str:
    """Return why a server cannot be reached, in one line without its address and what it sent. `ca_name` is what sets
    its authority."""
    inner: BaseException = wrong
    if isinstance(wrong, aiohttp.ClientConnectorCertificateError):
        inner = wrong.certificate_error
    elif isinstance(wrong, aiohttp.ClientConnectorError):
        inner = wrong.os_error
    if isinstance(inner, ssl.SSLCertVerificationError):
        mend = f"; {ca_name} names an authority" if inner.verify_code in _UNKNOWN_AUTHORITY else ""
        return f"its certificate is refused: {inner.verify_message.rstrip('.')}{mend}"
    if found := re.search(r"\[SSL: (\w+)\]", str(inner)):
        return f"TLS: {_words(found[1])}"
    if isinstance(inner, aiohttp.ClientResponseError | HttpProcessingError):  # the rest repeats what the server sent
        return re.split(r"[:\n]", inner.message, maxsplit=1)[0] or "it sends no HTTP"
    number = getattr(inner, "errno", None)
    if isinstance(number, int) and number in errno.errorcode:
        return os.strerror(number)
    return " ".join(str(getattr(inner, "strerror", None) or inner).split())[:200]


def _read(path: str, name: str) -> bytes:
    if not path:
        return b""
    try:
        return read_regular_file(Path(path), FILE_LIMIT_BYTES)
    except OSError as wrong:
        raise ConfigError(f"{name} {path}: {wrong.strerror}") from None


def _words(reason: str) -> str:
    return reason.replace("_", " ").lower() if reason.isupper() else reason
