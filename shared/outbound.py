"""How HTTP servers that are not ours are reached: at one address of their name."""

from __future__ import annotations

import socket

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult


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


def open_connector(address: str, *, most: int = 100) -> aiohttp.TCPConnector:
    """Return what makes at most this many connections: to an address, or if it is empty to those of the URL's host."""
    return aiohttp.TCPConnector(limit=most, resolver=FixedAddress(address) if address else None)
