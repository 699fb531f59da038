"""The URLs of `nats.url`: one server, or those of a cluster, separated by commas. Pure."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from shared.errors import ConfigError

SERVERS_LIMIT = 16
"""The maximum number of URLs. A cluster of NATS has three or five servers."""
_BETWEEN = re.compile(r"\s*,\s*(?=\w+://)")
"""A comma between two URLs; a password may have commas too."""
_SCHEMES = ("nats", "tls")


def server_urls(setting: str) -> tuple[str, ...]:
    """Return the URLs of the setting, each once. Raise ConfigError if one is neither nats://host:port nor
    tls://host:port."""
    urls = tuple(dict.fromkeys(_BETWEEN.split(setting.strip())))
    for url in urls:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in _SCHEMES and parts.hostname and (parts.port is None or parts.port > 0)
            usable = usable and "," not in (parts.hostname or "")
        except ValueError:
            usable = False
        if not usable:
            shown = without_password(url)
            raise ConfigError(f"nats.url: {shown} is not nats://host:port or tls://host:port (commas separate several)")
    if len(urls) > SERVERS_LIMIT:
        raise ConfigError(f"nats.url: {len(urls)} servers; the limit is {SERVERS_LIMIT}")
    return urls


def without_password(setting: str) -> str:
    """Return one URL, or several, without users and passwords."""
    return ", ".join(map(_without_password, _BETWEEN.split(setting.strip())))


def _without_password(url: str) -> str:
    before, at, host = url.rpartition("@")
    scheme, separator, _ = before.partition("://")
    return (f"{scheme}://{host}" if separator else f"…@{host}") if at else url
