"""Applies the KV events of one source to the index: engine hashes become sequence hashes. Pure.

    engine     e0 ──▶ e1 ──▶ e2        opaque ids, their tokens and parents
    ours       s0 ──▶ s1 ──▶ s2        XXH3 of the same chain: the hashes that prompts are looked up by

A run whose parent is not known is an *orphan*: it is parked together with the removals that follow it, and inserted
when the parent comes. The same block may be stored several times; it is gone when it was removed as often. Blocks that
depend on more than their tokens and images that are named as frontends do are known but not routable, and neither are
the blocks after them.

A store and the workers attached to it use the same engine hash for the same block. The beginning of a prefix may be on
a worker's device while only the store holds the rest of it. So a store also finds the parents of its blocks at its
workers.

Limits: `limit_blocks` known blocks per tier (more are ignored), and `orphan_limit_blocks` blocks in parked
runs (the oldest run is dropped).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest
from operator import xor

import msgspec

from services.router.index.index import TIERS, CandidateId, Index, Slot
from services.router.index.kv_events import CacheEvent, ClearedEvent, EngineHash, RemovedEvent, StoredEvent, shortened
from shared.errors import ProtocolError
from shared.hashing import NO_EXTRAS, SEED, seed_of, sequence_hashes, unpack_tokens
from shared.messages.kv_events import SnapshotBlock

_VOCABULARY_CHECKS = 64


class CardMismatch(ProtocolError):
    """The source contradicts its model card, so none of its events can be used."""


@dataclass(slots=True)
class _TierBlocks:
    """The known blocks of one tier."""

    hashes: dict[EngineHash, int | None] = field(default_factory=dict)
    """Engine hash → sequence hash; None if the block is not routable."""
    repeats: dict[EngineHash, int] = field(default_factory=dict)
    """Engine hash → number of times the block is stored beyond the first. The index has only the first."""
    seeds: dict[EngineHash, int] = field(default_factory=dict)
    """Engine hash → the hash seed of its chain, where that is not the default seed."""


@dataclass(slots=True, eq=False)
class _Orphan:
    """A run whose parent is unknown, and the removals since."""

    run: StoredEvent
    removed: list[EngineHash] = field(default_factory=list)


class SlotCleanup:
    """The blocks of a retired slot that are still to be removed from the index."""

    def __init__(self, index: Index, slot: Slot, tiers: list[_TierBlocks]) -> None:
        self._index = index
        self._slot = slot
        self._tiers = tiers

    def step(self, blocks: int) -> bool:
        """Remove up to `blocks` blocks; return False when none are left."""
        for tier, known in enumerate(self._tiers):
            taken = [known.hashes.popitem()[1] for _ in range(min(blocks, len(known.hashes)))]
            blocks -= len(taken)
            self._index.remove_blocks(self._slot, tier, [sequence for sequence in taken if sequence is not None])
        return any(known.hashes for known in self._tiers)


class Chains:
    """The blocks that one candidate holds."""

    def __init__(
        self,
        index: Index,
        candidate: CandidateId,
        *,
        block_size: int,
        vocab_size: int,
        limit_blocks: int,
        orphan_limit_blocks: int,
    ) -> None:
        self._index = index
        self.candidate = candidate
        self.slot = index.open_slot(candidate)
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._limit_blocks = limit_blocks
        self._orphan_limit_blocks = orphan_limit_blocks
        self._tiers = [_TierBlocks() for _ in TIERS]
        self._group: int | None = None
        """The KV cache group that is followed: the first one that keeps whole prefixes."""
        self._followed = False
        self._orphans: dict[EngineHash, list[_Orphan]] = {}
        """Parent → the runs that wait for it; oldest first."""
        self._runs_parked_with: dict[tuple[int, EngineHash], list[_Orphan]] = {}
        """(tier, block) → the parked runs that contain it, without those that it was removed from."""
        self.orphan_blocks = 0
        """Number of blocks that wait for their parent."""
        self._vocabulary_checks = _VOCABULARY_CHECKS
        self._digests = [0] * len(TIERS)
        self._store: Chains | None = None
        """For a worker: the store that it is attached to."""
        self._linked_workers: dict[Chains, None] = {}
        """For a store: the workers that are attached to it."""
        self.exact = True
        """Whether every event since the last clear was applied in full, so that our digest can be compared with the
        source's."""

    def link_store(self, store: Chains | None) -> None:
        """Let the worker whose blocks these are get blocks from this store, and from no other. Linear in the store's
        orphans."""
        if self._store is not None:
            del self._store._linked_workers[self]
        self._store = store
        if store is not None:
            store._linked_workers[self] = None
            store._resolve_orphans([parent for parent in store._orphans if self._tier_with(parent, 0) is not None])

    def apply(self, event: CacheEvent) -> SlotCleanup | None:
        """Apply one event. Raise CardMismatch if it contradicts the model card. A returned SlotCleanup is work left to
        do."""
        match event:
            case StoredEvent():
                self._stored(event)
            case RemovedEvent():
                self._removed(event)
            case ClearedEvent():
                return self.clear()
        return None

    def restore_snapshot(self, blocks: Sequence[SnapshotBlock], tier: int = 0) -> None:
        """Add blocks of a snapshot, all in one tier, parents first; a block whose parent is unknown is parked. Raise
        ProtocolError."""
        for block in blocks:
            if len(block.tokens) != 4 * self._block_size:
                raise CardMismatch(
                    f"a snapshot block has {len(block.tokens)} bytes, the block size is {self._block_size} tokens"
                )
            self._check_vocabulary(block.tokens)
            self._insert_or_park(
                StoredEvent(
                    hashes=shortened((block.hash,)),
                    parent=None if block.parent is None else shortened((block.parent,))[0],
                    tokens=block.tokens,
                    block_size=self._block_size,
                    tier=tier,
                    group=self._group,
                    windowed=False,
                    lora=block.lora,
                    salt=block.salt,
                    routable=1,
                    extras={0: block.extra} if block.extra else NO_EXTRAS,
                )
            )

    def clear(self) -> SlotCleanup:
        """Forget all blocks. The index finds none of them from now on. The returned SlotCleanup removes them in
        slices."""
        cleanup = self.close()
        self.slot = self._index.open_slot(self.candidate)
        return cleanup

    def close(self) -> SlotCleanup:
        """Forget all blocks for good, because the candidate is gone; no event may follow."""
        cleanup = SlotCleanup(self._index, self.slot, self._tiers)
        self._index.retire_slot(self.slot)
        self._tiers = [_TierBlocks() for _ in TIERS]
        self._orphans.clear()
        self._runs_parked_with.clear()
        self.orphan_blocks = 0
        self._vocabulary_checks = _VOCABULARY_CHECKS
        self._digests = [0] * len(TIERS)
        self.exact = True
        return cleanup

    # --- stored

    def _stored(self, event: StoredEvent) -> None:
        if not event.hashes or not self._is_followed_group(event):
            return
        if event.block_size != self._block_size:
            raise CardMismatch(
                f"events have blocks of {event.block_size} tokens, the model card says {self._block_size}"
            )
        self._check_vocabulary(event.tokens)
        self._insert_or_park(event)

    def _check_vocabulary(self, tokens: bytes) -> None:
        """Check the first few events only, because the check takes as long as all other work on an event."""
        if self._vocabulary_checks and tokens:
            self._vocabulary_checks -= 1
            highest = max(unpack_tokens(tokens))
            if highest >= self._vocab_size:
                raise CardMismatch(f"token id {highest} is outside the vocabulary of {self._vocab_size}")

    def _insert_or_park(self, event: StoredEvent) -> None:
        """Insert the run and the orphans that waited for it; or park it until its parent comes."""
        ready = [event]
        late: list[RemovedEvent] = []
        while ready:
            run = ready.pop()
            if run.parent is not None and self._tier_with(run.parent, run.tier) is None:
                self._park(run)
                continue
            self._insert(run)
            if self._orphans:
                ready += self._take_orphans_of(run.hashes, late)
            if self._store is not None and self._store._orphans:
                self._store._resolve_orphans(run.hashes)
        for removed in late:
            self._removed(removed)

    def _resolve_orphans(self, parents: Sequence[EngineHash]) -> None:
        """Insert the orphans that wait for one of these blocks, which a worker has stored."""
        late: list[RemovedEvent] = []
        for run in self._take_orphans_of(parents, late):
            self._insert_or_park(run)
        for removed in late:
            self._removed(removed)

    def _is_followed_group(self, event: StoredEvent) -> bool:
        """Return whether the event is about the one group of KV caches that is followed."""
        if not self._followed and not event.windowed:
            self._followed = True
            self._group = event.group
        if event.windowed or event.group != self._group:
            self.exact = False
            return False
        return True

    def _tier_with(self, block: EngineHash, first: int) -> _TierBlocks | None:
        """Return a tier that has the block: preferably `first`, else another tier of this candidate, else of an
        attached worker."""
        if block in self._tiers[first].hashes:
            return self._tiers[first]
        known = (tier for chains in (self, *self._linked_workers) for tier in chains._tiers if block in tier.hashes)
        return next(known, None)

    def _insert(self, run: StoredEvent) -> None:
        """Insert blocks after a known parent, or at the beginning of a chain."""
        tier_index, routable = run.tier, run.routable
        tier = self._tiers[tier_index]
        if run.parent is None:
            parent_sequence: int | None = None
            seed = seed_of(run.lora, run.salt)
        else:
            parent_tier = self._tier_with(run.parent, tier_index)
            if parent_tier is None:
                self.exact = False
                return
            parent_sequence = parent_tier.hashes[run.parent]
            seed = parent_tier.seeds.get(run.parent, SEED)
            routable = 0 if parent_sequence is None else routable
        engine_hashes = self._within_limit(tier, run.hashes)
        packed = run.tokens[: 4 * self._block_size * min(routable, len(engine_hashes))]
        sequences = sequence_hashes(packed, self._block_size, seed, parent_sequence, run.extras)
        new = dict.fromkeys(engine_hashes)
        if len(new) < len(engine_hashes) or not tier.hashes.keys().isdisjoint(new):
            new, stretches = self._without_repeats(tier, engine_hashes, sequences, parent_sequence)
            for before, stretch in stretches:
                self._index.add_blocks(self.slot, tier_index, stretch, before)
        else:
            self._index.add_blocks(self.slot, tier_index, sequences, parent_sequence)
            new = dict(zip_longest(engine_hashes, sequences))
        tier.hashes.update(new)
        if seed != SEED:
            tier.seeds.update(dict.fromkeys(new, seed))
        parked = self._runs_parked_with
        self._digests[tier_index] ^= (
            _digest(engine_hash for engine_hash in new if (tier_index, engine_hash) not in parked)
            if parked
            else _digest(new)
        )

    def _within_limit(self, tier: _TierBlocks, engine_hashes: Sequence[EngineHash]) -> Sequence[EngineHash]:
        """Return the leading blocks that fit within the limit."""
        room = self._limit_blocks - len(tier.hashes)
        if room >= len(engine_hashes):
            return engine_hashes
        for position, engine_hash in enumerate(engine_hashes):
            room -= engine_hash not in tier.hashes
            if room < 0:
                self.exact = False
                return engine_hashes[:position]
        return engine_hashes

    def _without_repeats(
        self,
        tier: _TierBlocks,
        engine_hashes: Sequence[EngineHash],
        sequences: Sequence[int],
        parent_sequence: int | None,
    ) -> tuple[dict[EngineHash, int | None], list[tuple[int | None, list[int]]]]:
        """Return the blocks that are not known yet with their sequence hashes, and the same hashes in stretches, each
        with the block that it follows. Known blocks are counted as repeats: a known engine hash keeps its sequence
        hash, whatever the event says."""
        new: dict[EngineHash, int | None] = {}
        stretches: list[tuple[int | None, list[int]]] = []
        extending = False
        for engine_hash, sequence in zip_longest(engine_hashes, sequences):
            if engine_hash in tier.hashes or engine_hash in new:
                tier.repeats[engine_hash] = tier.repeats.get(engine_hash, 0) + 1
                extending = False
            else:
                new[engine_hash] = sequence
                if sequence is not None:
                    if not extending:
                        stretches.append((parent_sequence, []))
                        extending = True
                    stretches[-1][1].append(sequence)
            parent_sequence = sequence
        return new, stretches

    # --- removed

    def _removed(self, event: RemovedEvent) -> None:
        if self._followed and event.group != self._group:
            return
        tier = self._tiers[event.tier]
        sequences: list[int] = []
        gone: list[EngineHash] = []
        for engine_hash in event.hashes:
            if engine_hash not in tier.hashes:
                self._remove_parked(event.tier, engine_hash)
                continue
            if tier.repeats and engine_hash in tier.repeats:
                tier.repeats[engine_hash] -= 1
                if not tier.repeats[engine_hash]:
                    del tier.repeats[engine_hash]
                continue
            sequence = tier.hashes.pop(engine_hash)
            tier.seeds.pop(engine_hash, None)
            if not self._runs_parked_with or (event.tier, engine_hash) not in self._runs_parked_with:
                gone.append(engine_hash)
            if sequence is not None:
                sequences.append(sequence)
        self._digests[event.tier] ^= _digest(gone)
        self._index.remove_blocks(self.slot, event.tier, sequences)

    # --- orphans

    def _park(self, run: StoredEvent) -> None:
        assert run.parent is not None
        # A run with a parent takes its seed from the parent; these strings may be of any length.
        orphan = _Orphan(msgspec.structs.replace(run, lora="", salt="") if run.lora or run.salt else run)
        self._orphans.setdefault(run.parent, []).append(orphan)
        for engine_hash in run.hashes:
            if not self._holds(run.tier, engine_hash):
                self._digests[run.tier] ^= _digest((engine_hash,))
            self._runs_parked_with.setdefault((run.tier, engine_hash), []).append(orphan)
        self.orphan_blocks += len(run.hashes)
        while self.orphan_blocks > self._orphan_limit_blocks:
            oldest = next(iter(self._orphans.values()))[0]
            self.exact = False
            self._forget_orphan(oldest)

    def _remove_parked(self, tier: int, engine_hash: EngineHash) -> None:
        runs = self._runs_parked_with.get((tier, engine_hash))
        if runs is None:
            return
        orphan = runs.pop()
        if not runs:
            del self._runs_parked_with[tier, engine_hash]
            self._digests[tier] ^= _digest((engine_hash,))
        orphan.removed.append(engine_hash)
        if len(orphan.removed) == len(orphan.run.hashes):
            self._forget_orphan(orphan)

    def _forget_orphan(self, orphan: _Orphan) -> None:
        run = orphan.run
        assert run.parent is not None
        waiting = self._orphans[run.parent]
        waiting.remove(orphan)
        if not waiting:
            del self._orphans[run.parent]
        left = (Counter(run.hashes) - Counter(orphan.removed)).elements()
        for engine_hash in left:
            runs = self._runs_parked_with[run.tier, engine_hash]
            runs.remove(orphan)
            if not runs:
                del self._runs_parked_with[run.tier, engine_hash]
                if not self._holds(run.tier, engine_hash):
                    self._digests[run.tier] ^= _digest((engine_hash,))
        self.orphan_blocks -= len(run.hashes)

    def _take_orphans_of(self, engine_hashes: Sequence[EngineHash], late: list[RemovedEvent]) -> list[StoredEvent]:
        """Remove and return the runs that wait for one of `engine_hashes`. Their removals are appended to `late`,
        because blocks after a removed block must find it first."""
        runs: list[StoredEvent] = []
        for engine_hash in engine_hashes:
            for orphan in list(self._orphans.get(engine_hash, ())):
                self._forget_orphan(orphan)
                runs.append(orphan.run)
                if orphan.removed:
                    late.append(RemovedEvent(orphan.removed, orphan.run.tier, orphan.run.group))
        return runs

    def _holds(self, tier: int, engine_hash: EngineHash) -> bool:
        return engine_hash in self._tiers[tier].hashes or (tier, engine_hash) in self._runs_parked_with

    # --- statistics and tests

    def digest(self, tier: int) -> int:
        """Return the XOR of the engine hashes of all blocks that the source holds in a tier according to its events, as
        far as their bits are kept. Orphans and blocks that are not routable are included."""
        return self._digests[tier]

    def blocks_in(self, tier: int) -> dict[EngineHash, int | None]:
        """Return a copy of engine hash → sequence hash for the blocks known in a tier."""
        return dict(self._tiers[tier].hashes)

    def validate(self) -> None:
        """Assert every invariant. Linear in the blocks."""
        for tier in self._tiers:
            assert len(tier.hashes) <= self._limit_blocks
            assert tier.repeats.keys() <= tier.hashes.keys()
            assert all(count > 0 for count in tier.repeats.values())
            assert tier.seeds.keys() <= tier.hashes.keys()
        runs = [orphan for waiting in self._orphans.values() for orphan in waiting]
        assert all(waiting for waiting in self._orphans.values())
        assert self.orphan_blocks == sum(len(orphan.run.hashes) for orphan in runs) <= self._orphan_limit_blocks
        assert all(len(orphan.removed) < len(orphan.run.hashes) for orphan in runs)
        assert all(chains._store is self for chains in self._linked_workers)
        assert self._store is None or self in self._store._linked_workers
        listed = sum(len(orphans) for orphans in self._runs_parked_with.values())
        assert listed == sum(len(orphan.run.hashes) - len(orphan.removed) for orphan in runs)
        for tier_index, tier in enumerate(self._tiers):
            held = tier.hashes.keys() | {engine_hash for at, engine_hash in self._runs_parked_with if at == tier_index}
            assert self._digests[tier_index] == _digest(held)


def _digest(engine_hashes: Iterable[EngineHash]) -> int:
    return reduce(xor, engine_hashes, 0)
