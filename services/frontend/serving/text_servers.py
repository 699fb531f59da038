"""Sends requests to servers that take text alone: one try of a request, and why it brought no answer.

Where a server is says the card of its worker, and only workers write cards. The card has an IP address: no name is
looked up here, so that none can lead elsewhere later, and redirects are not followed. The name in the server's URL is
what the request names, and what its certificate must be of.

What the client sent in headers stays here: its key, its cookies. It gets the headers of the server that PASSED
names, and no others.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from io import BytesIO
from urllib.parse import urlsplit

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct
from yarl import URL

from services.frontend.config import TextServersConfig
from services.frontend.serving.text_tries import TextFault
from shared.errors import ConfigError
from shared.messages.cards import ModelCard
from shared.outbound import TlsFiles, TlsNames, describe_fault, open_connector, read_key, read_tls
from shared.version import VERSION

PASSED = ("Content-Type", "Content-Encoding", "Retry-After")
"""The headers of a server that its client gets."""
READ_BYTES = 64 << 10
"""Bytes of an answer that wait to be passed on before its server is not read any more. There may be twice as many."""
LARGE_BYTES = 1 << 20
"""Bytes from which on a body is sent in pieces, so that other tasks run between them."""
IDLE_CONNECTION_S = 4.0
"""Seconds for which an idle connection is kept: less than the five after which uvicorn and llama.cpp close theirs."""
TLS_NAMES = TlsNames("text.ca_file", "text.client_cert", "text.client_key")


def read_text_files(config: TextServersConfig) -> tuple[str, ssl.SSLContext | None]:
    """Return the servers' key, empty if they need none, and the TLS to them. Raise ConfigError."""
    tls = read_tls(TlsFiles(config.ca_file, config.client_cert, config.client_key), TLS_NAMES)
    return read_key(config.api_key_file, f"text.api_key_file: {config.api_key_file}"), tls


class TextAnswer(Struct, frozen=True):
    """An answer whose headers have come, and its first part: empty if it has none."""

    response: aiohttp.ClientResponse
    first: bytes


class TextServers:
    """The connections to all of these servers."""

    def __init__(self, config: TextServersConfig, connections: int) -> None:
        """`connections` is the most at once. Raise ConfigError for the files of the key and of TLS."""
        self._config, self._connections = config, connections
        _, self._tls = read_text_files(config)
        self._opened: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Close all connections."""
        if self._opened is not None:
            await self._opened.close()

    def _session(self) -> aiohttp.ClientSession:
        """Return the session, opened for the first request: most frontends have no such servers."""
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                headers={"User-Agent": f"headrace/{VERSION}", "Accept-Encoding": "identity"},
                connector=open_connector("", self._tls, most=self._connections, idle_s=IDLE_CONNECTION_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=READ_BYTES,
            )
        return self._opened

    async def send(self, card: ModelCard, path: str, body: bytes, request: str) -> TextAnswer | TextFault:
        """Send a request to the server of a card. Return its answer as soon as a part of it has come, or why there is
        none. Cancelling it closes the connection."""
        try:
            answer = await self._post(card, path, body, request)
            try:
                return TextAnswer(answer, await answer.content.readany())
            except BaseException:
                answer.close()
                raise
        except ConfigError as wrong:
            return TextFault("unreachable", str(wrong))
        except RuntimeError as wrong:  # the session is closed, because the process ends
            return TextFault("gone", broken(wrong))
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as wrong:
            return TextFault("unreachable", f"does not answer: {describe_fault(wrong, TLS_NAMES.ca_file)}")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as wrong:
            return TextFault("gone", broken(wrong))
        except (aiohttp.ClientError, HttpProcessingError, ValueError) as wrong:
            return TextFault("senseless", f"sends no answer: {describe_fault(wrong, TLS_NAMES.ca_file)}")

    async def _post(self, card: ModelCard, path: str, body: bytes, request: str) -> aiohttp.ClientResponse:
        """Send a request, and return its answer's headers. Raise ConfigError for the file of the key."""
        url = urlsplit(card.server)
        headers = {"Host": url.netloc, "Content-Type": "application/json", "X-Request-Id": request}
        if key := read_key(self._config.api_key_file, "text.api_key_file"):
            headers["Authorization"] = f"Bearer {key}"
        return await self._session().post(
            URL(f"{url.scheme}://{card.address}{url.path.rstrip('/')}{path}", encoded=True),
            data=body if len(body) <= LARGE_BYTES else BytesIO(body),
            headers=headers,
            allow_redirects=False,
            server_hostname=url.hostname if url.scheme == "https" else None,
        )


def passed_headers(answer: aiohttp.ClientResponse) -> Mapping[str, str]:
    """Return the headers of an answer that its client gets."""
    return {name: answer.headers[name] for name in PASSED if name in answer.headers}


def broken(wrong: BaseException) -> str:
    """Return why a connection brings no more."""
    if isinstance(wrong, aiohttp.ClientPayloadError):  # its words are those of a parser
        return "broke off before the answer's end"
    return f"broke off: {describe_fault(wrong, TLS_NAMES.ca_file)}"
