"""From one source's events to the index: engine hashes become sequence hashes. Pure.

    engine     e0 ──▶ e1 ──▶ e2        opaque ids, their tokens and parents
    ours       s0 ──▶ s1 ──▶ s2        XXH3 of the same chain: what prompts are asked with

A run whose parent is not known is kept, with the removals that follow it, and joined when the parent comes. The same
block may be stored several times and is gone when it was removed as often. Blocks that hold more than tokens (images)
are known but not routable, nor is what follows them.

A store and the workers attached to it call the same block by the same name, and the beginning of a prefix may be on a
device while the store holds the rest of it alone: so a store finds its blocks' parents at those workers too.

Bounds: `limit_blocks` known blocks a tier (more are ignored and counted), `orphan_limit_blocks` in runs that wait for
their parent (the oldest run goes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec
from msgspec import Struct

from services.router.index.index import TIERS, CandidateId, Index, Slot
from services.router.index.kv_events import CacheEvent, Cleared, EngineHash, Removed, Stored
from shared.errors import ProtocolError
from shared.hashing import SEED, seed_of, sequence_hashes, unpack_tokens
from shared.messages import SnapshotBlock

_VOCABULARY_CHECKS = 64
_LOW_BITS = (1 << 64) - 1


class Mismatch(ProtocolError):
    """The source contradicts its model card: nothing it says can be used."""


class ChainStatistics(Struct, frozen=True):
    """Counts of one source."""

    blocks: int
    """Known now, each tier counted."""
    orphans: int
    """Blocks waiting for their parent."""
    ignored_blocks: int
    """Stored beyond the limit, or in runs given up at the orphans' limit, since the start."""
    unknown_removals: int
    """Removals of blocks that were not known, since the start."""


@dataclass(slots=True)
class _Known:
    """One tier's blocks."""

    hashes: dict[EngineHash, int | None] = field(default_factory=dict)
    """Engine hash → sequence hash; None: not routable."""
    repeats: dict[EngineHash, int] = field(default_factory=dict)
    """How often a block is stored beyond the first; the index is told of that one alone."""
    seeds: dict[EngineHash, int] = field(default_factory=dict)
    """The hash seed of the block's chain where it is not the plain one."""


@dataclass(slots=True, eq=False)
class _Orphan:
    """A run whose parent is unknown, and the removals since."""

    run: Stored
    removed: list[EngineHash] = field(default_factory=list)


class Clearing:
    """The blocks of a slot that was given up, still to be removed from the index."""

    def __init__(self, index: Index, slot: Slot, tiers: list[_Known]) -> None:
        self._index = index
        self._slot = slot
        self._tiers = tiers

    def step(self, blocks: int) -> bool:
        """Remove up to so many blocks; False when none are left."""
        for tier, known in enumerate(self._tiers):
            taken = [known.hashes.popitem()[1] for _ in range(min(blocks, len(known.hashes)))]
            blocks -= len(taken)
            self._index.removed(self._slot, tier, [sequence for sequence in taken if sequence is not None])
        return any(known.hashes for known in self._tiers)


class Chains:
    """What one candidate holds."""

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
        self.slot = index.open(candidate)
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._limit_blocks = limit_blocks
        self._orphan_limit_blocks = orphan_limit_blocks
        self._tiers = [_Known() for _ in TIERS]
        self._group: int | None = None
        """The KV cache group we follow: the first that keeps whole prefixes."""
        self._followed = False
        self._orphans: dict[EngineHash, list[_Orphan]] = {}
        """By the parent they wait for; oldest first."""
        self._orphaned: dict[tuple[int, EngineHash], list[_Orphan]] = {}
        """(tier, block) → the runs that have it, less those it was removed from."""
        self._orphan_blocks = 0
        self._vocabulary_checks = _VOCABULARY_CHECKS
        self._ignored_blocks = 0
        self._unknown_removals = 0
        self._digests = [0] * len(TIERS)
        self._store: Chains | None = None
        """Of a worker: the store that it is attached to."""
        self._attached: dict[Chains, None] = {}
        """Of a store: the workers."""
        self.exact = True
        """Nothing that the source told of was left out since the last clear: our digest can be compared with its."""

    def attach(self, store: Chains | None) -> None:
        """The worker whose blocks these are gets blocks from this store now, and from no other. Linear in the store's
        orphans."""
        if self._store is not None:
            del self._store._attached[self]
        self._store = store
        if store is not None:
            store._attached[self] = None
            store._adopt([parent for parent in store._orphans if self._tier_of(parent, 0) is not None])

    def apply(self, event: CacheEvent) -> Clearing | None:
        """One event. Raises Mismatch where it contradicts the model card. A Clearing is work left to do."""
        match event:
            case Stored():
                self._stored(event)
            case Removed():
                self._removed(event)
            case Cleared():
                return self.clear()
        return None

    def restore(self, blocks: Sequence[SnapshotBlock], tier: int = 0) -> None:
        """Blocks of a snapshot, all in one tier, parents first; one whose parent is gone waits for it. Raises
        ProtocolError."""
        for block in blocks:
            if len(block.tokens) != 4 * self._block_size:
                raise Mismatch(f"snapshot block of {len(block.tokens)} bytes, block size {self._block_size}")
            self._check_vocabulary(block.tokens)
            self._take(
                Stored(
                    hashes=[block.hash],
                    parent=block.parent,
                    tokens=block.tokens,
                    block_size=self._block_size,
                    tier=tier,
                    group=self._group,
                    windowed=False,
                    lora=block.lora,
                    salt=block.salt,
                    routable=1,
                )
            )

    def clear(self) -> Clearing:
        """Forget everything, at once for whoever asks the index; the Clearing does the rest in slices."""
        clearing = self.close()
        self.slot = self._index.open(self.candidate)
        return clearing

    def close(self) -> Clearing:
        """The candidate is gone; no event may follow."""
        clearing = Clearing(self._index, self.slot, self._tiers)
        self._index.retire(self.slot)
        self._tiers = [_Known() for _ in TIERS]
        self._orphans.clear()
        self._orphaned.clear()
        self._orphan_blocks = 0
        self._vocabulary_checks = _VOCABULARY_CHECKS
        self._digests = [0] * len(TIERS)
        self.exact = True
        return clearing

    # --- stored

    def _stored(self, event: Stored) -> None:
        if not event.hashes or not self._follows(event):
            return
        if event.block_size != self._block_size:
            raise Mismatch(f"events have blocks of {event.block_size} tokens, the model card {self._block_size}")
        self._check_vocabulary(event.tokens)
        self._take(event)

    def _check_vocabulary(self, tokens: bytes) -> None:
        """Of the first few only: it takes as long as all the rest."""
        if self._vocabulary_checks and tokens:
            self._vocabulary_checks -= 1
            highest = max(unpack_tokens(tokens))
            if highest >= self._vocab_size:
                raise Mismatch(f"token id {highest} is outside the vocabulary of {self._vocab_size}")

    def _take(self, event: Stored) -> None:
        """Place the run, and what waited for it; or let it wait for its parent."""
        ready = [event]
        late: list[Removed] = []
        while ready:
            run = ready.pop()
            if run.parent is not None and self._tier_of(run.parent, run.tier) is None:
                self._keep_orphan(run)
                continue
            self._place(run.tier, run.parent, run.hashes, run.tokens, run.lora, run.salt, routable=run.routable)
            if self._orphans:
                ready += self._joined(run.hashes, late)
            if self._store is not None and self._store._orphans:
                self._store._adopt(run.hashes)
        for removed in late:
            self._removed(removed)

    def _adopt(self, parents: Sequence[EngineHash]) -> None:
        """A worker has these: what waits here for one of them is placed."""
        late: list[Removed] = []
        for run in self._joined(parents, late):
            self._take(run)
        for removed in late:
            self._removed(removed)

    def _follows(self, event: Stored) -> bool:
        """Whether the event is about the one group of KV caches that we follow."""
        if not self._followed and not event.windowed:
            self._followed = True
            self._group = event.group
        if event.windowed or event.group != self._group:
            self.exact = False
            return False
        return True

    def _tier_of(self, block: EngineHash, first: int) -> _Known | None:
        """A tier that has the block, preferably `first`, else one of ours, else an attached worker's."""
        if block in self._tiers[first].hashes:
            return self._tiers[first]
        known = (tier for chains in (self, *self._attached) for tier in chains._tiers if block in tier.hashes)
        return next(known, None)

    def _place(
        self,
        number: int,
        parent: EngineHash | None,
        names: Sequence[EngineHash],
        packed: bytes,
        lora: str,
        salt: str,
        *,
        routable: int,
    ) -> None:
        """Blocks behind a known parent, or at the beginning of a chain."""
        tier = self._tiers[number]
        if parent is None:
            above: int | None = None
            seed = seed_of(lora, salt)
        else:
            home = self._tier_of(parent, number)
            if home is None:
                self._ignored_blocks += len(names)
                self.exact = False
                return
            above = home.hashes[parent]
            seed = home.seeds.get(parent, SEED)
            routable = 0 if above is None else routable
        names = self._within_limit(tier, names)
        stride = 4 * self._block_size
        sequences = sequence_hashes(packed[: stride * min(routable, len(names))], self._block_size, seed, above)
        fresh = dict(zip_longest(names, sequences))
        stretches = [(above, sequences)]
        if len(fresh) < len(names) or not tier.hashes.keys().isdisjoint(fresh):
            fresh, stretches = self._without_repeats(tier, names, sequences, above)
        tier.hashes.update(fresh)
        if seed != SEED:
            tier.seeds.update(dict.fromkeys(fresh, seed))
        orphaned = self._orphaned
        self._digests[number] ^= (
            _digest(name for name in fresh if (number, name) not in orphaned) if orphaned else _digest(fresh)
        )
        for before, stretch in stretches:
            self._index.stored(self.slot, number, stretch, before)

    def _within_limit(self, tier: _Known, names: Sequence[EngineHash]) -> Sequence[EngineHash]:
        """Those that come before the first that is one too many."""
        room = self._limit_blocks - len(tier.hashes)
        if room >= len(names):
            return names
        for position, name in enumerate(names):
            room -= name not in tier.hashes
            if room < 0:
                self._ignored_blocks += len(names) - position
                self.exact = False
                return names[:position]
        return names

    def _without_repeats(
        self, tier: _Known, names: Sequence[EngineHash], sequences: Sequence[int], above: int | None
    ) -> tuple[dict[EngineHash, int | None], list[tuple[int | None, list[int]]]]:
        """Those not known yet, with their sequence hashes, and these in stretches, each behind the block it follows.
        The others are counted: what they are called already stays what they are, whatever is told of them now."""
        fresh: dict[EngineHash, int | None] = {}
        stretches: list[tuple[int | None, list[int]]] = []
        goes_on = False
        for name, sequence in zip_longest(names, sequences):
            if name in tier.hashes or name in fresh:
                tier.repeats[name] = tier.repeats.get(name, 0) + 1
                goes_on = False
            else:
                fresh[name] = sequence
                if sequence is not None:
                    if not goes_on:
                        stretches.append((above, []))
                        goes_on = True
                    stretches[-1][1].append(sequence)
            above = sequence
        return fresh, stretches

    # --- removed

    def _removed(self, event: Removed) -> None:
        if self._followed and event.group != self._group:
            return
        tier = self._tiers[event.tier]
        sequences: list[int] = []
        gone: list[EngineHash] = []
        for name in event.hashes:
            if name not in tier.hashes:
                self._remove_orphan(event.tier, name)
                continue
            if tier.repeats and name in tier.repeats:
                tier.repeats[name] -= 1
                if not tier.repeats[name]:
                    del tier.repeats[name]
                continue
            sequence = tier.hashes.pop(name)
            tier.seeds.pop(name, None)
            if not self._orphaned or (event.tier, name) not in self._orphaned:
                gone.append(name)
            if sequence is not None:
                sequences.append(sequence)
        self._digests[event.tier] ^= _digest(gone)
        self._index.removed(self.slot, event.tier, sequences)

    # --- orphans

    def _keep_orphan(self, run: Stored) -> None:
        assert run.parent is not None
        # A run with a parent has its seed from there, and these may be of any length.
        orphan = _Orphan(msgspec.structs.replace(run, lora="", salt="") if run.lora or run.salt else run)
        self._orphans.setdefault(run.parent, []).append(orphan)
        for name in run.hashes:
            if not self._holds(run.tier, name):
                self._digests[run.tier] ^= _digest((name,))
            self._orphaned.setdefault((run.tier, name), []).append(orphan)
        self._orphan_blocks += len(run.hashes)
        while self._orphan_blocks > self._orphan_limit_blocks:
            oldest = next(iter(self._orphans.values()))[0]
            self._ignored_blocks += len(oldest.run.hashes) - len(oldest.removed)
            self.exact = False
            self._forget_orphan(oldest)

    def _remove_orphan(self, tier: int, name: EngineHash) -> None:
        runs = self._orphaned.get((tier, name))
        if runs is None:
            self._unknown_removals += 1
            return
        orphan = runs.pop()
        if not runs:
            del self._orphaned[tier, name]
            self._digests[tier] ^= _digest((name,))
        orphan.removed.append(name)
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
        for name in left:
            runs = self._orphaned[run.tier, name]
            runs.remove(orphan)
            if not runs:
                del self._orphaned[run.tier, name]
                if not self._holds(run.tier, name):
                    self._digests[run.tier] ^= _digest((name,))
        self._orphan_blocks -= len(run.hashes)

    def _joined(self, names: Sequence[EngineHash], late: list[Removed]) -> list[Stored]:
        """Runs that wait for one of `names`. Their removals go to `late`: what follows a removed block must find it
        first."""
        runs: list[Stored] = []
        for name in names:
            for orphan in list(self._orphans.get(name, ())):
                self._forget_orphan(orphan)
                runs.append(orphan.run)
                if orphan.removed:
                    late.append(Removed(orphan.removed, orphan.run.tier, orphan.run.group))
        return runs

    def _holds(self, tier: int, name: EngineHash) -> bool:
        return name in self._tiers[tier].hashes or (tier, name) in self._orphaned

    # --- for people and tests

    def digest(self, tier: int) -> int:
        """XOR of the low 64 bits of the engine hashes of all blocks that the source holds in a tier, as it tells:
        orphans and blocks that cannot be routed to included."""
        return self._digests[tier]

    def statistics(self) -> ChainStatistics:
        """Counts, in constant time."""
        return ChainStatistics(
            blocks=sum(len(tier.hashes) for tier in self._tiers),
            orphans=self._orphan_blocks,
            ignored_blocks=self._ignored_blocks,
            unknown_removals=self._unknown_removals,
        )

    def held(self, tier: int) -> dict[EngineHash, int | None]:
        """Engine hash → sequence hash of the blocks known in a tier; a copy."""
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
        assert self._orphan_blocks == sum(len(orphan.run.hashes) for orphan in runs) <= self._orphan_limit_blocks
        assert all(len(orphan.removed) < len(orphan.run.hashes) for orphan in runs)
        assert all(chains._store is self for chains in self._attached)
        assert self._store is None or self in self._store._attached
        listed = sum(len(orphans) for orphans in self._orphaned.values())
        assert listed == sum(len(orphan.run.hashes) - len(orphan.removed) for orphan in runs)
        for number, tier in enumerate(self._tiers):
            held = tier.hashes.keys() | {name for at, name in self._orphaned if at == number}
            assert self._digests[number] == _digest(held)


def _digest(names: Iterable[EngineHash]) -> int:
    """XOR of the low 64 bits of each; of bytes the last eight, big-endian."""
    bits = 0
    for name in names:
        bits ^= name if isinstance(name, int) else int.from_bytes(name[-8:], "big")
    return bits & _LOW_BITS
