"""Which peers are asked for blocks, and how many blocks are worth reading from one. Pure.

    unknown ──learn──▶ known ──failed──▶ resting, twice as long each time ──time is over──▶ known
                         │ ▲                                                                │
                         │ └──read_done: its rate is measured ◀─────────────────────────────┘
                         └──forget──▶ unknown

A read is worth it if it brings enough blocks within the time that a Fetch may wait, at the rate that was measured. A
peer that was too slow is read all the same once in REST_MOST_S: only a read shows whether it still is.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from services.kvbm.peers.messages import PeerAddress

PEERS_MOST = 4096
"""The most peers that are known. Further ones are not asked."""
FIRST_RATE = 1.25e9
"""The bytes a second that a peer is taken to have before its first read: a network of 10 Gbit/s. Too much costs one
Fetch its `wait_s`; too little, and nothing is read that would show better."""
RATE_LEAST, RATE_MOST = 1e3, 1e12
"""The bounds of what is believed of a measured rate."""
WEIGHT = 0.3
"""The share of the latest read in a peer's rate."""
REST_S = 1.0
REST_MOST_S = 60.0


class KnownPeer(Struct):
    """A peer, with its measured rate and its rest after a fault."""

    address: PeerAddress
    layouts: frozenset[str]
    rate: float = FIRST_RATE
    """Bytes a second."""
    measured: bool = False
    """True once it was read."""
    rests_until_s: float = 0.0
    rest_s: float = 0.0
    """The length of its last rest; 0: it has answered since."""
    read_at_s: float = 0.0
    """When it was last worth a read."""


class PeerChoice:
    """The peers of one kvbm."""

    def __init__(self, least_blocks: int, asked: int) -> None:
        """`asked` peers at most are asked at once."""
        self._least_blocks = least_blocks
        self._asked = asked
        self.known: dict[str, KnownPeer] = {}

    def learn(self, address: PeerAddress, layouts: Collection[str]) -> None:
        """Record what the address book says. What was measured at another address is forgotten."""
        before = self.known.get(address.instance)
        if before is not None and before.address == address:
            before.layouts = frozenset(layouts)
        elif before is not None or len(self.known) < PEERS_MOST:
            self.known[address.instance] = KnownPeer(address, frozenset(layouts))

    def forget(self, instance: str) -> bool:
        """Forget a peer that has left. Return whether it was known."""
        return self.known.pop(instance, None) is not None

    def candidates(self, layout: str, now_s: float) -> list[PeerAddress]:
        """Return the peers to ask, the fastest first."""
        fit = [peer for peer in self.known.values() if layout in peer.layouts and peer.rests_until_s <= now_s]
        fit.sort(key=lambda peer: -peer.rate)
        return [peer.address for peer in fit[: self._asked]]

    def rates(self, now_s: float) -> dict[str, float]:
        """Return the rates, in bytes a second, of the fastest peers that do not rest: those that are asked first."""
        usable = [peer for peer in self.known.values() if peer.rests_until_s <= now_s]
        usable.sort(key=lambda peer: -peer.rate)
        return {peer.address.instance: peer.rate for peer in usable[: self._asked]}

    def worth(self, instance: str, blocks: int, block_bytes: int, left_s: float, now_s: float) -> int:
        """Return how many of these leading blocks to read from the peer in the time that is left; 0: none."""
        peer = self.known.get(instance)
        if peer is None or blocks < self._least_blocks:
            return 0
        affordable = min(blocks, int(peer.rate * max(0.0, left_s) / block_bytes))
        if affordable < self._least_blocks:
            if now_s < peer.read_at_s + REST_MOST_S:
                return 0
            affordable = self._least_blocks
        peer.read_at_s = now_s
        return affordable

    def failed(self, instance: str, now_s: float) -> None:
        """Let a peer rest after a fault."""
        peer = self.known.get(instance)
        if peer is not None:
            peer.rest_s = min(REST_MOST_S, max(REST_S, 2 * peer.rest_s))
            peer.rests_until_s = now_s + peer.rest_s

    def read_done(self, instance: str, size_bytes: int, took_s: float) -> None:
        """Record a read that brought all its blocks."""
        peer = self.known.get(instance)
        if peer is not None:
            peer.rest_s = 0.0
            if size_bytes > 0 and took_s > 0:
                measured = min(RATE_MOST, max(RATE_LEAST, size_bytes / took_s))
                peer.rate += (WEIGHT if peer.measured else 1.0) * (measured - peer.rate)
                peer.measured = True

    def validate(self) -> None:
        """Raise AssertionError where the peers contradict themselves."""
        assert len(self.known) <= PEERS_MOST, "too many peers"
        for instance, peer in self.known.items():
            assert peer.address.instance == instance, "a peer under another name"
            assert RATE_LEAST <= peer.rate <= RATE_MOST, "a rate beyond belief"
            assert 0 <= peer.rest_s <= REST_MOST_S, "a rest without an end"
