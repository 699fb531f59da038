"""The servers that `route` is given, as arguments or lines of a file. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from msgspec import Struct

from shared.errors import ConfigError

MOST_TARGETS = 64
"""Most servers of one `route`: each has a worker of its own."""
_PORTS = {"http": 80, "https": 443}


class Target(Struct, frozen=True):
    """A server that is wanted."""

    given: str
    """How it was written."""
    url: str
    """Its URL with its port, and without a path: the same for each way to write it."""
    host: str
    port: int
    address: str = ""
    """The address of the host that is meant, if the host is a name."""

    @property
    def name(self) -> str:
        """What people read."""
        return f"{self.url} at {self.address}" if self.address else self.url

    @property
    def worker(self) -> str:
        """The name of its worker, and of that worker's log."""
        return f"worker-{self.url.replace('://', '-')}{self.address and f'-{self.address}'}"


def parse_targets(texts: Iterable[str], of: str = "") -> tuple[Target, ...]:
    """Return the servers. Raise ConfigError that names the first wrong one; `of` is the file that they are from."""
    found: dict[tuple[str, int], Target] = {}
    for text in texts:
        target = parse_target(text, of)
        if (before := found.setdefault((target.host, target.port), target)) is not target:
            raise ConfigError(f"{of}{text}: the same server as {before.given}")
    if len(found) > MOST_TARGETS:
        raise ConfigError(f"{of}{len(found)} servers: at most {MOST_TARGETS}")
    return tuple(found.values())


def parse_file(file: str, text: str) -> tuple[Target, ...]:
    """Return the servers in a file: one a line; empty lines and those that begin with # are passed over. Raise
    ConfigError that names the file."""
    lines = (line.strip() for line in text.splitlines())
    return parse_targets((line for line in lines if line and not line.startswith("#")), f"{file}: ")


def parse_target(text: str, of: str = "") -> Target:
    """Return one server. Raise ConfigError; `of` is the file that it is from."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as wrong:
        raise ConfigError(f"{of}{text}: {wrong}") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigError(f"{of}{text}: not a URL such as http://127.0.0.1:8001")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{of}{text}: a user, a query or a fragment; a key belongs in the file of --api-key-file")
    if parts.path.rstrip("/") not in ("", "/v1"):  # clients' base URLs end in /v1
        raise ConfigError(f"{of}{text}: has a path; give {parts.scheme}://{parts.netloc} alone")
    if port == 0 or any(character.isspace() or not character.isprintable() for character in text):
        raise ConfigError(f"{of}{text!r}: not a URL such as http://127.0.0.1:8001")
    host, port = parts.hostname, _PORTS[parts.scheme] if port is None else port
    return Target(text, f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}", host, port)
