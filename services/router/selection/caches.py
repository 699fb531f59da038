"""FleetCaches: whose cached blocks of one model the router follows, and who can use them. Pure.

    a candidate (instance, rank) ── chains ──▶ blocks of its device ─┐
        │ the card of the instance names a store                     ├──▶ index
        ▼                                                            │
    a store, which its kvbm's events fill ── chains ──▶ its blocks ──┘
        │ its kvbm reports links
        ▼
    stores of other machines

A store is not a candidate; its blocks count for the instances attached to it. A card may name a store that the router
does not follow yet, or no longer follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from services.router.config import IndexConfig
from services.router.index.chains import Chains, SlotCleanup
from services.router.index.index import CandidateId, Index
from services.router.index.inheritance import StoreId, kvbm_of, store_id_of
from services.router.selection.eligibility import ranks_of
from services.router.selection.peer_links import PeerLinks, RemoteSearch
from shared.messages.cards import ModelCard
from shared.messages.kvbm import KvbmReport


class FleetCaches:
    """The caches of one model's instances, and the stores that they are attached to."""

    def __init__(self, index: Index, config: IndexConfig, cards: Mapping[str, ModelCard]) -> None:
        """`cards` has the card of each instance, from before `add_instance` until after `remove_instance`."""
        self._index = index
        self._config = config
        self._cards = cards
        self.chains: dict[CandidateId, Chains] = {}
        self.stores: dict[StoreId, Chains] = {}
        """Blocks of the followed stores."""
        self.links = PeerLinks()
        self.instances_of_store: dict[StoreId, set[str]] = {}
        """Store → the instances whose cards name it, whether or not it is followed; never empty."""

    def add_instance(self, card: ModelCard) -> None:
        """Add the caches of a new instance."""
        for rank in ranks_of(card):
            self.chains[card.instance, rank] = self._new_chains((card.instance, rank), card)
        self.link_store(card.instance, None, store_id_of(card))

    def link_store(self, instance: str, before: StoreId | None, after: StoreId | None) -> None:
        """Link the instance to another store, or to none."""
        if before == after:
            return
        if before is not None:
            self.instances_of_store[before].discard(instance)
            if not self.instances_of_store[before]:
                del self.instances_of_store[before]
        if after is not None:
            self.instances_of_store.setdefault(after, set()).add(instance)
        for rank in ranks_of(self._cards[instance]):
            self._index.set_store((instance, rank), None if after is None else (after, 0))
            self.chains[instance, rank].link_store(None if after is None else self.stores.get(after))

    def remove_instance(self, card: ModelCard) -> list[SlotCleanup]:
        """Remove the caches of an instance, and return the cleanup left to do."""
        self.link_store(card.instance, store_id_of(card), None)
        return [self.chains.pop((card.instance, rank)).close() for rank in ranks_of(card)]

    def add_store(self, name: StoreId) -> Chains:
        """Start to follow a store that at least one instance is attached to; its events are to be applied to the
        returned chains."""
        assert name not in self.stores
        card = self._cards[next(iter(self.instances_of_store[name]))]
        chains = self.stores[name] = self._new_chains((name, 0), card)
        for worker in self._chains_linked_to(name):
            worker.link_store(chains)
        return chains

    def remove_store(self, name: StoreId) -> SlotCleanup:
        """Stop following a store, and return the cleanup left to do."""
        for worker in self._chains_linked_to(name):
            worker.link_store(None)
        cleanup = self.stores.pop(name).close()
        if not any(kvbm_of(each) == kvbm_of(name) for each in self.stores):
            self.links.forget(kvbm_of(name))
        return cleanup

    def apply_kvbm_report(self, report: KvbmReport) -> None:
        """Apply what a kvbm reports of its peers; ignore it if no followed store is its own."""
        if any(kvbm_of(name) == report.instance for name in self.stores):
            self.links.learn(report.instance, report.peers)

    def remote_search(self, hashes: Sequence[int], block_bytes: int) -> RemoteSearch | None:
        """Return a search of other machines' stores for a prompt's blocks; None if no store reads another."""
        if not self.links:
            return None
        numbers = {name: chains.slot.number for name, chains in self.stores.items()}
        return RemoteSearch(self.links, self._index, numbers, hashes, block_bytes)

    def _new_chains(self, candidate: CandidateId, card: ModelCard) -> Chains:
        return Chains(
            self._index,
            candidate,
            block_size=card.block_size,
            vocab_size=card.vocab_size,
            limit_blocks=max(self._config.lower_tier_limit_blocks, card.capacity_blocks),
            orphan_limit_blocks=self._config.orphan_limit_blocks,
        )

    def _chains_linked_to(self, name: StoreId) -> Iterator[Chains]:
        for instance in self.instances_of_store.get(name, ()):
            for rank in ranks_of(self._cards[instance]):
                yield self.chains[instance, rank]

    def validate(self) -> None:
        """Assert every invariant."""
        assert self.chains.keys() == {(card.instance, rank) for card in self._cards.values() for rank in ranks_of(card)}
        for chains in (*self.chains.values(), *self.stores.values()):
            chains.validate()
        named = {(store, card.instance) for card in self._cards.values() if (store := store_id_of(card)) is not None}
        assert named == {(store, instance) for store, those in self.instances_of_store.items() for instance in those}
        assert all(self.instances_of_store.values())
        self.links.validate()
