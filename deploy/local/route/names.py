"""Which servers the names of hosts stand for: each address of a name is a server. Pure.

    looked up   the addresses of the answer are servers; one that MISSED such answers in a row lack is let go
    not found   nothing changes, and the fault is said once

`localhost`, and an address in place of a name, are not looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from msgspec.structs import replace

from deploy.local.route.targets import MOST_TARGETS, Target

LOOKUP_S = 5.0
"""Seconds between two lookups of a name."""
MISSED = 3
"""Number of lookups in a row without an address after which its server is let go."""


@dataclass(slots=True)
class _Name:
    due_s: float
    addresses: dict[str, int] = field(default_factory=dict)
    """Each with the number of the latest lookups in a row that were without it."""
    fault: str = ""


class Names:
    """The names of hosts of one `route`, and their addresses. Times are seconds on a monotonic clock."""

    def __init__(self) -> None:
        self._names: dict[str, _Name] = {}
        self._servers: tuple[Target, ...] = ()
        self._said: frozenset[str] = frozenset()

    def due(self, targets: Sequence[Target], now_s: float) -> list[str]:
        """Return the names that are to be looked up now, and forget those of other targets."""
        hosts = dict.fromkeys(target.host for target in targets if _is_name(target.host))
        self._names = {host: self._names.get(host) or _Name(now_s) for host in hosts}
        due = [host for host, name in self._names.items() if now_s >= name.due_s]
        for host in due:
            self._names[host].due_s = now_s + LOOKUP_S
        return due

    def looked_up(self, host: str, addresses: Sequence[str], fault: str = "") -> None:
        """Apply the answer of a lookup: addresses, or why there are none."""
        name = self._names.get(host)
        if name is None:
            return
        name.fault = "" if addresses else fault or "no address"
        if addresses:
            missed = {address: 0 if address in addresses else count + 1 for address, count in name.addresses.items()}
            now = missed | dict.fromkeys(addresses, 0)
            name.addresses = {address: count for address, count in now.items() if count < MISSED}

    def servers(self, targets: Sequence[Target]) -> tuple[tuple[Target, ...], list[str]]:
        """Return the servers that these stand for, and what is to be said of them: each fault once, while it holds. If
        there are too many, those that were there stay."""
        every = [server for target in targets for server in self._servers_of(target)]
        found: dict[tuple[str, int], Target] = {}
        for server in every:
            found.setdefault(_place(server), server)
        faults = [self._fault(host, name) for host, name in self._names.items() if name.fault]
        faults += [
            f"{server.name}: left out: the same server as {first.name}"
            for server in every
            if (first := found[_place(server)]) is not server
        ]
        if len(found) > MOST_TARGETS:
            faults.append(
                f"{len(found)} servers: the last {len(found) - MOST_TARGETS} are left out, {MOST_TARGETS} stay"
            )
        known = {server.name for server in self._servers}
        self._servers = tuple(sorted(found.values(), key=lambda server: server.name not in known)[:MOST_TARGETS])
        new = [fault for fault in faults if fault not in self._said]
        self._said = frozenset(faults)
        return self._servers, new

    def _servers_of(self, target: Target) -> Iterator[Target]:
        if not _is_name(target.host):
            yield target
        elif target.host in self._names:
            for address in self._names[target.host].addresses:
                yield replace(target, address=address)

    @staticmethod
    def _fault(host: str, name: _Name) -> str:
        stay = f"; its servers ({len(name.addresses)}) stay as they are" if name.addresses else ""
        return f"the host {host} has no address: {name.fault}{stay}"

    def validate(self) -> None:
        """Assert every invariant."""
        assert len(self._servers) <= MOST_TARGETS
        assert len({server.name for server in self._servers}) == len(self._servers)
        for name in self._names.values():
            assert all(0 <= count < MISSED for count in name.addresses.values())


def _place(server: Target) -> tuple[str, int]:
    return server.address or server.host, server.port


def _is_name(host: str) -> bool:
    if host == "localhost":
        return False
    try:
        ip_address(host)
    except ValueError:
        return True
    return False
