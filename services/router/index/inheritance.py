"""Which candidates inherit from which block stores, and the ids of stores. Pure.

    store k ◀── heir a      a block that k has in host memory or on disk counts for a too
            ◀── heir b

A *store* is one layout of one kvbm, named KVBM/LAYOUT: all blocks that an attached worker can fetch there. KV events
are sent per store.

Stores and heirs are named whether or not they have a slot. So when a slot is retired and another one is opened,
the new one gives or inherits at once. A store cannot be chosen, so `find` never returns it. Masks have one bit per
slot, at its number.

A store's events are applied once, to a slot of its own, and not to the slot of each worker that can read it: eight
workers would cost eight times the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

from shared.messages.cards import ModelCard

CandidateId = tuple[str, int]
"""(instance, data-parallel rank); for a store (its name, 0)."""

StoreId = str
"""A name of the form KVBM/LAYOUT; ids contain no slash."""

_UNIONS_LIMIT = 1024


def store_id(kvbm: str, layout: str) -> StoreId:
    """Return the name of the store."""
    return f"{kvbm}/{layout}"


def store_id_of(card: ModelCard) -> StoreId | None:
    """Return the store that the card's instance is attached to, if there is one."""
    return store_id(card.kvbm, card.kvbm_layout) if card.kvbm and card.kvbm_layout else None


def kvbm_of(name: StoreId) -> str:
    """Return the kvbm's instance id."""
    return name.partition("/")[0]


def layout_of(name: StoreId) -> str:
    """Return the digest of the layout."""
    return name.partition("/")[2]


class Inheritance:
    """The open slots of stores and heirs."""

    def __init__(self) -> None:
        self._store_of: dict[CandidateId, CandidateId] = {}
        self._heirs_of: dict[CandidateId, dict[CandidateId, None]] = {}
        """The reverse of `_store_of`; a store without heirs has no entry."""
        self._open: dict[CandidateId, int] = {}
        """Candidate → number of its open slot; stores and all other candidates."""
        self._heir_masks: dict[int, int] = {}
        """Bit of a store's slot → mask of the slots that inherit from it."""
        self._unions: dict[int, int] = {}
        """Mask of stores' slots → mask of all slots that inherit from at least one of them; a bounded memo."""
        self.stores = 0
        """Mask of the slots that others inherit from."""

    def set_store(self, candidate: CandidateId, store: CandidateId | None) -> None:
        """From now on, `candidate` inherits from `store` and from no other store."""
        before = self._store_of.pop(candidate, None)
        if before is not None:
            del self._heirs_of[before][candidate]
            if not self._heirs_of[before]:
                del self._heirs_of[before]
            self._rebuild_mask(before)
        if store is not None:
            assert store not in self._store_of, "nothing inherits from an heir"
            assert candidate not in self._heirs_of, "a store inherits nothing"
            self._store_of[candidate] = store
            self._heirs_of.setdefault(store, {})[candidate] = None
            self._rebuild_mask(store)

    def slot_opened(self, candidate: CandidateId, number: int) -> None:
        """Record the slot that the candidate holds blocks in from now on."""
        self._open[candidate] = number
        self._rebuild_mask(self._store_of.get(candidate, candidate))

    def slot_retired(self, candidate: CandidateId) -> None:
        """Record that the candidate has no slot."""
        bit = 1 << self._open.pop(candidate)
        self._unions.clear()
        if self._heir_masks.pop(bit, None) is not None:
            self.stores &= ~bit
        elif candidate in self._store_of:
            self._rebuild_mask(self._store_of[candidate])

    def with_heirs(self, holding: int) -> int:
        """Return the slots in `holding`, and those that inherit from stores among them."""
        stores = holding & self.stores
        if not stores:
            return holding
        inheriting = self._unions.get(stores)
        return holding | (self._union(stores) if inheriting is None else inheriting)

    def _union(self, stores: int) -> int:
        if len(self._unions) >= _UNIONS_LIMIT:
            self._unions.clear()
        inheriting = 0
        for bit, heirs in self._heir_masks.items():
            if stores & bit:
                inheriting |= heirs
        self._unions[stores] = inheriting
        return inheriting

    def _rebuild_mask(self, store: CandidateId) -> None:
        """Rebuild the masks of a store from its current heirs."""
        number = self._open.get(store)
        if number is None:
            return
        bit = 1 << number
        self._unions.clear()
        heirs = self._heirs_of.get(store)
        if heirs is None:
            self._heir_masks.pop(bit, None)
            self.stores &= ~bit
        else:
            self._heir_masks[bit] = self._mask(heirs)
            self.stores |= bit

    def _mask(self, candidates: Iterable[CandidateId]) -> int:
        """Return the mask of those candidates that have a slot."""
        return sum(1 << self._open[candidate] for candidate in candidates if candidate in self._open)

    def validate(self) -> None:
        """Assert every invariant."""
        pairs = {(heir, store) for store, heirs in self._heirs_of.items() for heir in heirs}
        assert pairs == set(self._store_of.items())
        assert all(self._heirs_of.values())
        assert not self._store_of.keys() & self._heirs_of.keys()
        assert len(set(self._open.values())) == len(self._open), "two candidates in one slot"
        assert self._heir_masks == {
            1 << self._open[store]: self._mask(heirs) for store, heirs in self._heirs_of.items() if store in self._open
        }
        assert self.stores == sum(self._heir_masks)
        assert len(self._unions) <= _UNIONS_LIMIT
        for stores, inheriting in self._unions.items():
            parts = [heirs for bit, heirs in self._heir_masks.items() if bit & stores]
            assert inheriting == reduce(or_, parts, 0)
