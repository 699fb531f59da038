"""RankPeers: what the process of a further rank gets to find its peers. Pure."""

from __future__ import annotations

from msgspec import Struct


class RankPeers(Struct, frozen=True, kw_only=True):
    """A rank's place among its peers. Descriptors are numbers that it has from its parent."""

    rank: int
    exchange: int
    """The descriptor of the memory of Peers."""
    exchange_bytes: int
    sockets: tuple[int, ...]
    """The descriptor of the connection to each rank; -1 for itself."""
    start_limit_s: float
    limit_s: float
    parent_pid: int
