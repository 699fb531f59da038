"""Fetches images by URL: from hosts that a setting names, and from public addresses alone.

    URL ─▶ is its host named? ─▶ its addresses, once ─▶ all public? ─▶ GET at the first ─▶ the file
     ▲                                                                   │ 301, 302, 303, 307, 308
     └───────────────── each URL of a redirect, as the first ────────────┘

The connection goes to the address that was checked, so that a name which means another one a moment later changes
nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence

import aiohttp
from yarl import URL

from shared.outbound import describe_fault, open_connector

REDIRECTS_LIMIT = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK_BYTES = 64 << 10
_HEADERS = {"Accept": "image/png, image/jpeg, image/webp, image/gif", "Accept-Encoding": "identity"}
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that stand for those of IPv4 in their last bits."""
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
"""Addresses of IPv4 in another form."""
_UNICAST = ipaddress.IPv6Network("2000::/3")
"""The part of IPv6 from which addresses of the Internet are given out. Python also calls others global: fec0::1, and
forms of IPv4's such as ::127.0.0.1 and 64:ff9b:1::7f00:1."""
_SPECIAL = tuple(
    ipaddress.ip_network(one) for one in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20")
)
"""Further addresses that Python calls global, in its older versions or in all: those of protocols and of documents in
IANA's registries, and the address at which machines in Azure reach their host. Clouds have metadata at some of them."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a name. Raises OSError."""


class FetchFailed(Exception):
    """A URL has no image for us; the text says why: the rest of a sentence whose subject is the image."""


async def resolve_name(name: str, port: int) -> Sequence[str]:
    """Return the addresses of a name, as the system finds them. Raise OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(place[0]) for *_, place in found]


def is_public(address: str) -> bool:
    """Return whether an address is one of the Internet: not private, not of this machine, not of one link, not of
    several receivers, and no other form of such an address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # with a zone, so that of a link
        return False
    inner: Sequence[ipaddress.IPv4Address | None] = ()
    if isinstance(found, ipaddress.IPv6Address):
        if not any(found in network for network in (_UNICAST, _NAT64, _MAPPED)):
            return False
        low = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) if found in _NAT64 else None
        inner = (found.ipv4_mapped, found.sixtofour, *(found.teredo or ()), low)
    return all(one is None or _is_global(one) for one in (found, *inner))


def _is_global(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    special = any(address in network for network in _SPECIAL)
    return address.is_global and not address.is_multicast and not special


class ImageFetcher:
    """Fetches one image at a time for each caller."""

    def __init__(
        self,
        hosts: Collection[str],
        *,
        bytes_limit: int,
        time_limit_s: float,
        resolve: Resolve = resolve_name,
        allows: Callable[[str], bool] = is_public,
    ) -> None:
        """Create it. `hosts` are names, or names with a port. `allows` says whether an address may be reached."""
        self._hosts = {host.lower() for host in hosts}
        self._bytes_limit = bytes_limit
        self._time_limit_s = time_limit_s
        self._resolve = resolve
        self._allows = allows

    def check(self, url: str) -> URL:
        """Return a URL whose host may be asked. Raise FetchFailed."""
        try:
            parsed = URL(url)
            host, port = parsed.raw_host, parsed.port
        except ValueError:
            raise FetchFailed("has no URL that can be read") from None
        if parsed.scheme not in ("http", "https") or not host:
            raise FetchFailed("has a URL that is neither http, https nor data")
        if parsed.raw_user is not None or parsed.raw_password is not None:
            raise FetchFailed("has a URL with a user's name, which is not sent")
        named = host.lower() if parsed.is_default_port() else f"{host.lower()}:{port}"
        if named not in self._hosts:
            mend = "send its data, as data:image/png;base64,…"
            raise FetchFailed(f"is at {named[:255]}, which images.hosts does not name; {mend}")
        return parsed

    async def fetch(self, url: str) -> tuple[bytes, str]:
        """Return the bytes at a URL and the media type that its server states. Raise FetchFailed."""
        try:
            async with asyncio.timeout(self._time_limit_s):
                for _ in range(REDIRECTS_LIMIT + 1):
                    found = await self._get(self.check(url))
                    if not isinstance(found, str):
                        return found
                    url = found
        except TimeoutError:
            raise FetchFailed(f"was not fetched within {self._time_limit_s:g} s (images.fetch_s)") from None
        raise FetchFailed(f"is redirected more than {REDIRECTS_LIMIT} times")

    async def _get(self, url: URL) -> tuple[bytes, str] | str:
        """Return the bytes at a URL and their media type, or the URL that it leads to. Raise FetchFailed."""
        connector = open_connector(await self._address(url), None, most=1)
        jar = aiohttp.DummyCookieJar()
        try:
            async with (
                aiohttp.ClientSession(connector=connector, cookie_jar=jar, auto_decompress=False) as session,
                session.get(url, headers=_HEADERS, allow_redirects=False) as answer,
            ):
                target = answer.headers.get("Location")
                if answer.status in _REDIRECTS and target:
                    return str(url.join(URL(target)))
                if answer.status != 200:
                    raise FetchFailed(f"is not there: its server answers {answer.status}")
                if answer.headers.get("Content-Encoding", "identity") != "identity":
                    raise FetchFailed("comes compressed, which its server was asked not to do")
                return await self._body(answer), answer.content_type
        except (aiohttp.ClientError, OSError, ValueError) as wrong:
            raise FetchFailed(f"cannot be fetched: {describe_fault(wrong, 'SSL_CERT_FILE')}") from None

    async def _body(self, answer: aiohttp.ClientResponse) -> bytes:
        """Return an answer's body, of which no more than the limit is read. Raise FetchFailed."""
        body = bytearray()
        known = answer.content_length or 0
        if known <= self._bytes_limit:
            async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
                body += chunk
                if len(body) > self._bytes_limit:
                    break
        if max(known, len(body)) > self._bytes_limit:
            raise FetchFailed(f"has more than {self._bytes_limit} bytes (images.bytes)")
        return bytes(body)

    async def _address(self, url: URL) -> str:
        """Return the one address of a URL's host that is asked. Raise FetchFailed."""
        assert url.raw_host is not None
        assert url.port is not None
        try:
            found = await self._resolve(url.raw_host, url.port)
        except (OSError, UnicodeError):
            found = ()
        if not found:
            raise FetchFailed(f"is at {url.raw_host}, which has no address")
        for address in found:
            if not self._allows(address):
                raise FetchFailed(f"is at {url.raw_host}, which has the address {address}, and that is not public")
        return found[0]
