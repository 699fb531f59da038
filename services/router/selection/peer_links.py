"""Which block stores can read which other machines' stores, and how many blocks of a prompt. Pure.

    a kvbm reports its rates ──▶ learn           reader's store ◀── link ── lender's store, of the same layout

A store reads from another while a Fetch waits, so for a limited time, and only what the other one has in memory. What
is wrong or late here makes a choice less good, and never wrong: what does not come is computed.

A link counts as 10 Gbit/s until it was used: if it counted for nothing, it would never be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

from msgspec import Struct
from msgspec.structs import replace

from services.router.index.index import CandidateId, Index
from services.router.index.inheritance import StoreId, kvbm_of, layout_of, store_id
from services.router.selection.candidates import CandidateState
from shared.messages.kvbm import PeerRates
from shared.messages.select import Overlap

LINKS_MOST = 16
"""The most links of one kvbm that are believed; a kvbm reports four for each layout."""
STARTS_MOST = 8
"""The most different ends of what candidates have themselves from which on other stores are searched, for one prompt.
Each costs about as much as finding what the candidates have."""


class PeerLink(Struct, frozen=True):
    """How one store reads another."""

    bytes_per_s: float
    wait_s: float
    least_blocks: int

    def blocks_in_time(self, blocks: int, block_bytes: int) -> int:
        """Return how many of these leading blocks come in time. 0 if they are not read."""
        if block_bytes <= 0:
            return 0
        coming = min(blocks, int(self.bytes_per_s * self.wait_s / block_bytes))
        return coming if coming >= max(1, self.least_blocks) else 0


class RemoteBlocks(Struct, frozen=True, gc=False):
    """Blocks that one candidate gets from another machine."""

    blocks: int
    block_s: float
    """Seconds for each."""


NO_REMOTE = RemoteBlocks(0, 0.0)


class PeerLinks:
    """The links of all kvbms that have stores of a model."""

    def __init__(self) -> None:
        self._of_kvbm: dict[str, dict[str, PeerLink]] = {}
        """Kvbm that reads → kvbm that lends → link. Kvbms without links are not here."""

    def __bool__(self) -> bool:
        return bool(self._of_kvbm)

    def learn(self, kvbm: str, rates: PeerRates | None) -> None:
        """Record what a kvbm reports now; what it reported before is forgotten. Values that make no sense are
        ignored."""
        links: dict[str, PeerLink] = {}
        if rates is not None and 0 < rates.wait_s < 3600 and rates.least_blocks >= 0:
            for other, rate in list(rates.bytes_per_s.items())[:LINKS_MOST]:
                if rate > 0 and isfinite(rate) and other != kvbm:
                    links[other] = PeerLink(rate, rates.wait_s, rates.least_blocks)
        if links:
            self._of_kvbm[kvbm] = links
        else:
            self._of_kvbm.pop(kvbm, None)

    def forget(self, kvbm: str) -> None:
        """Forget a kvbm's links to others. Links to it end when the others report."""
        self._of_kvbm.pop(kvbm, None)

    def links_of(self, reader: StoreId) -> Iterable[tuple[StoreId, PeerLink]]:
        """Return the stores that a store can read, with the links."""
        layout = layout_of(reader)
        return [(store_id(kvbm, layout), link) for kvbm, link in self._of_kvbm.get(kvbm_of(reader), {}).items()]

    def link(self, reader: StoreId, lender: StoreId) -> PeerLink | None:
        """Return how `reader` reads `lender`; None if it does not. Blocks of another layout are never read."""
        if layout_of(reader) != layout_of(lender):
            return None
        return self._of_kvbm.get(kvbm_of(reader), {}).get(kvbm_of(lender))

    def validate(self) -> None:
        """Assert every invariant."""
        for kvbm, links in self._of_kvbm.items():
            assert 0 < len(links) <= LINKS_MOST
            assert kvbm not in links, "a kvbm reads itself"


class RemoteSearch:
    """Searches other machines' stores for the rest of one prompt. Equal questions are answered once."""

    def __init__(
        self, links: PeerLinks, index: Index, numbers: dict[StoreId, int], hashes: Sequence[int], block_bytes: int
    ) -> None:
        """`numbers` are the open slots of the followed stores. `hashes` are those of the blocks that can be found."""
        self._links = links
        self._index = index
        self._numbers = numbers
        self._hashes = hashes
        self._block_bytes = block_bytes
        self._held: dict[int, dict[CandidateId, int]] = {}
        """Start → how many blocks each store holds from there on."""
        self._answers: dict[tuple[StoreId, int], RemoteBlocks] = {}

    def added_to(self, state: CandidateState, reader: StoreId | None) -> CandidateState:
        """Return the candidate of the store `reader` with the blocks that it would get from other machines."""
        found = self.rest(reader, state.overlap.blocks)
        if not found.blocks:
            return state
        device, host, disk = state.overlap.device, state.overlap.host, state.overlap.disk
        return replace(state, overlap=Overlap(device, host, disk, found.blocks), remote_s=found.block_s)

    def rest(self, reader: StoreId | None, start: int) -> RemoteBlocks:
        """Return what a candidate of the store `reader`, which has `start` leading blocks itself, gets from the store
        of which most of the following ones come in time."""
        if reader is None or start >= len(self._hashes):
            return NO_REMOTE
        answer = self._answers.get((reader, start))
        if answer is None:
            answer = self._answers[reader, start] = self._search(reader, start)
        return answer

    def _search(self, reader: StoreId, start: int) -> RemoteBlocks:
        links = [(store, link) for store, link in self._links.links_of(reader) if store in self._numbers]
        if not links:
            return NO_REMOTE
        held = self._held.get(start)
        if held is None:
            if len(self._held) >= STARTS_MOST:
                return NO_REMOTE
            held = self._held[start] = self._index.find_in_memory(self._hashes, start, self._numbers.values())
        # Like the kvbm, which asks several and reads from the one of which most comes in time.
        found = (self.from_link(link, held.get((store, 0), 0)) for store, link in links)
        return max(found, key=lambda each: (each.blocks, -each.block_s))

    def from_link(self, link: PeerLink, blocks: int) -> RemoteBlocks:
        """Return what comes of `blocks` over a link."""
        coming = link.blocks_in_time(blocks, self._block_bytes)
        return RemoteBlocks(coming, self._block_bytes / link.bytes_per_s) if coming else NO_REMOTE

    def handed_over(self, reader: StoreId, lender: StoreId, blocks: int) -> RemoteBlocks:
        """Return what a worker of the store `reader` gets of `blocks` that are about to be in the store `lender`."""
        link = self._links.link(reader, lender)
        return NO_REMOTE if link is None else self.from_link(link, blocks)
