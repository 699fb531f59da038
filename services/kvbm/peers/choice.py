"""Which peers are asked for blocks, and how many blocks are worth reading from one. Pure.

    unknown ──learn──▶ known ──failed──▶ resting, twice as long each time ──time is over──▶ known
                         │ ▲                                                                │
                         │ └──read_done: its rate is measured ◀─────────────────────────────┘
                         └──forget──▶ unknown

A read is worth it if it brings enough blocks within the time that a Fetch may wait, at the rate that was measured. Only
a read shows whether a peer that was slow still is, so a rate is believed for RATE_S after the last read. Then what is
reported to routers is no less than FIRST_RATE, and the fewest blocks that are worth a read are read.
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
RATE_S = 60.0
"""For how long a rate is believed after the last read."""


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
    """The length of its last rest. 0 if it has answered since."""
    read_at_s: float = -RATE_S
    """When the last read of it began."""
    asked_at_s: float = 0.0

    def shown_rate(self, now_s: float) -> float:
        """Return the rate for routers, and for who is asked."""
        return self.rate if now_s < self.read_at_s + RATE_S else max(self.rate, FIRST_RATE)


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
        """Return the peers to ask, the fastest first. If there are more than are asked at once, those that are not
        among the fastest have one place in turn: they may have become faster, and may have blocks that no other has."""
        fit = self._fit(layout, now_s)
        if len(fit) > self._asked:
            fit[self._asked - 1 :] = [min(fit[self._asked - 1 :], key=lambda peer: peer.asked_at_s)]
        return [peer.address for peer in fit]

    def note_asked(self, peers: Collection[PeerAddress], now_s: float) -> None:
        """Record that these are asked now."""
        for address in peers:
            if (peer := self.known.get(address.instance)) is not None:
                peer.asked_at_s = now_s

    def rates(self, layouts: Collection[str], now_s: float) -> dict[str, float]:
        """Return the rates, in bytes a second, of the fastest peers of each layout that do not rest."""
        fastest = [peer for layout in layouts for peer in self._fit(layout, now_s)[: self._asked]]
        return {peer.address.instance: peer.shown_rate(now_s) for peer in fastest}

    def _fit(self, layout: str, now_s: float) -> list[KnownPeer]:
        fit = [peer for peer in self.known.values() if layout in peer.layouts and peer.rests_until_s <= now_s]
        return sorted(fit, key=lambda peer: -peer.shown_rate(now_s))

    def worth(self, instance: str, blocks: int, block_bytes: int, left_s: float, now_s: float) -> int:
        """Return how many of these leading blocks to read from the peer in the time that is left. 0 if there is
        none."""
        peer = self.known.get(instance)
        if peer is None or blocks < self._least_blocks:
            return 0
        affordable = min(blocks, int(peer.rate * max(0.0, left_s) / block_bytes))
        if affordable >= self._least_blocks:
            return affordable
        return 0 if now_s < peer.read_at_s + RATE_S else self._least_blocks

    def read_begins(self, instance: str, now_s: float) -> None:
        """Record that the peer is read: its rate is believed for a while."""
        peer = self.known.get(instance)
        if peer is not None:
            peer.read_at_s = now_s

    def read_done(self, instance: str, size_bytes: int, took_s: float) -> None:
        """Record a read that brought all its blocks."""
        peer = self.known.get(instance)
        if peer is not None:
            peer.rest_s = 0.0
            self.measure(instance, size_bytes, took_s)

    def measure(self, instance: str, size_bytes: int, took_s: float) -> None:
        """Record how fast a read was, whether it brought all its blocks or not."""
        peer = self.known.get(instance)
        if peer is not None and size_bytes > 0 and took_s > 0:
            measured = min(RATE_MOST, max(RATE_LEAST, size_bytes / took_s))
            peer.rate += (WEIGHT if peer.measured else 1.0) * (measured - peer.rate)
            peer.measured = True

    def failed(self, instance: str, now_s: float) -> None:
        """Let a peer rest after a fault."""
        peer = self.known.get(instance)
        if peer is not None:
            peer.rest_s = min(REST_MOST_S, max(REST_S, 2 * peer.rest_s))
            peer.rests_until_s = now_s + peer.rest_s

    def validate(self) -> None:
        """Raise AssertionError if the peers contradict themselves."""
        assert len(self.known) <= PEERS_MOST, "too many peers"
        for instance, peer in self.known.items():
            assert peer.address.instance == instance, "a peer under another name"
            assert RATE_LEAST <= peer.rate <= RATE_MOST, "a rate beyond belief"
            assert 0 <= peer.rest_s <= REST_MOST_S, "a rest without an end"
