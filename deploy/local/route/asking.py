"""Asks a server what it is. Each fault is one line, and nothing takes longer than its limit."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from deploy.local.route.answers import EVENT_SOURCES, MODEL_LIST, VERSION, Found, find_events, takes_text
from deploy.local.route.targets import Target
from deploy.local.usage import By
from shared.errors import MALFORMED, ConfigError, Unavailable
from shared.outbound import TlsFiles, TlsNames, describe_fault, open_connector, read_key, read_tls
from shared.vllm_sizes import read_sizes

ASK_LIMIT_S = 5.0
"""Seconds for each answer of a server."""
ANSWER_LIMIT_BYTES = 8 << 20
"""Most bytes of an answer."""
TLS_NAMES = TlsNames("--ca-file", "--client-cert", "--client-key")
CONNECT_LIMIT_S = 2.0
"""Seconds for a connection to the port of its KV events."""


def key_of(file: Path | None) -> str:
    """Return the key in a file; empty without one. Raise ConfigError."""
    return "" if file is None else read_key(str(file), f"--api-key-file {file}")


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a name: those of IPv4, or if it has none those of IPv6, since both kinds lead to the same
    servers. It blocks. Raise Unavailable."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as wrong:
        raise Unavailable(str(getattr(wrong, "strerror", None) or wrong)) from None
    of_ipv4 = [address for family, _, _, _, address in found if family == socket.AF_INET]
    return [str(address[0]) for address in of_ipv4 or [address for *_, address in found]]


async def ask(target: Target, key_file: Path | None, tls: TlsFiles, by: By = "auto") -> Found:
    """Return what a server says. Raise Unavailable, and ConfigError for what it will not mend by itself. With `by` text
    nothing but its models is asked for."""
    key, context = key_of(key_file), read_tls(tls, TLS_NAMES)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit = aiohttp.ClientTimeout(total=ASK_LIMIT_S)
    connector = open_connector(target.address, context)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=limit) as http:
        listed = await _get(http, target, "/v1/models")
        try:
            models = MODEL_LIST.decode(listed or b"")
        except MALFORMED as wrong:
            raise ConfigError(f"/v1/models is no list of models: {wrong}"[:200]) from None
        if by == "text":
            return Found(models, text=True)
        version, metrics = await _get(http, target, "/version"), await _get(http, target, "/metrics")
        sources = await _get(http, target, "/kv_event_sources")
    found = Found(models)
    with contextlib.suppress(*MALFORMED):
        said = VERSION.decode(version or b"").get("version")
        found = msgspec.structs.replace(found, version=str(said)[:64] if said else "")
    block_size, blocks, ranks = read_sizes((metrics or b"").decode(errors="replace"))
    if by == "auto" and takes_text(models, block_size):
        return Found(models, text=True)
    try:
        kv_events = None if sources is None else EVENT_SOURCES.decode(sources)
    except MALFORMED:
        kv_events = None
    events, replay, lacks = find_events(target.address or target.host, kv_events, ranks)
    for endpoint in filter(None, (events, replay)):
        if not await _listens(endpoint):
            events, replay, lacks = "", "", f"nothing answers at {endpoint}, where its KV events are"
    return msgspec.structs.replace(
        found, block_size=block_size, blocks=blocks, ranks=ranks, events=events, replay=replay, lacks=lacks
    )


async def _get(http: aiohttp.ClientSession, target: Target, path: str) -> bytes | None:
    """Return an answer; None if the server does not have it. Raise as `ask`; without /v1/models it is no server."""
    content = bytearray()
    try:
        async with http.get(target.url + path, allow_redirects=False) as answer:
            if path != "/v1/models" and (300 <= answer.status < 500 or answer.status == 501):
                return None  # llama.cpp has 501 for metrics that are off; a provider wants other keys for such paths
            if answer.status in (401, 403):
                raise ConfigError(f"{path} answers {answer.status}: give its key with --api-key-file")
            if answer.status != 200:
                raise Unavailable(f"{path} answers {answer.status}")
            async for chunk in answer.content.iter_any():
                content += chunk
                if len(content) > ANSWER_LIMIT_BYTES:
                    raise ConfigError(f"{path} answers more than {ANSWER_LIMIT_BYTES} bytes")
    except TimeoutError:
        raise Unavailable(f"{path} did not answer in {ASK_LIMIT_S:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as wrong:
        raise Unavailable(f"does not answer: {describe_fault(wrong, TLS_NAMES.ca_file)}") from None
    return bytes(content)


async def _listens(endpoint: str) -> bool:
    """Return whether something listens at a ZeroMQ endpoint."""
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            if endpoint.startswith("ipc://"):
                _, writer = await asyncio.open_unix_connection(endpoint.removeprefix("ipc://"))
            else:
                parts = urlsplit(endpoint)
                _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (TimeoutError, OSError):
        return False
    writer.close()
    return True
