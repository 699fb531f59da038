"""KVCacheManager: the device's KV blocks. Sequences hold them, the prefix cache finds them, the kvbm fills and reads
them. Pure.

    Scheduler ─── admit, grow, reuse_cached, cache_full_blocks, free ──▶ ┌──────────────────────┐
                                                                         │ BlockPool            │ ──▶ events: blocks
    KVConnector ─ fetch_changes, begin_load, end_loads, end_fetch ─────▶ │ Onboarding: from kvbm│     stored and evicted
                  offers, pin, unpin, new_discards ────────────────────▶ │ Offloading: to kvbm  │
                                                                         └──────────────────────┘

For each sequence that holds blocks, one block is kept available, so that the sequence can grow: neither an admission
nor a copy takes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from services.worker.contracts.device_blocks import FetchRequest
from services.worker.limits import SchedulerLimits
from services.worker.scheduler.block_notes import EVERY_BLOCK, BlockNotes
from services.worker.scheduler.kv_offloading import Offloading
from services.worker.scheduler.kv_onboarding import Onboarding
from services.worker.scheduler.sequence import Sequence
from shared.blocks import BlockPool, Content, ContentEvicted, PoolEvent, PoolStatistics
from shared.hashing import ContentKey


class KVCacheManager:
    """The blocks of one engine.

    The scheduler calls the methods of the first part between steps, and `consider` and `uncached_tokens` also for an
    attempt that comes while a step is under way. The connector may call those of the second part while one is.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._block_size = limits.block_size
        self._look_ahead = limits.look_ahead
        self._pool = BlockPool(limits.capacity_blocks)
        self.notes = BlockNotes()
        self.onboarding = Onboarding(
            self._pool, block_size=limits.block_size, look_ahead=limits.look_ahead, wait_s=limits.wait_s
        )
        """Which waiting sequences wait for blocks of the kvbm."""
        self.offloading = Offloading(self._pool, limits.offload, limits.offers_limit, self.notes)
        """Which blocks the kvbm is offered, each once; the connector takes its `offers`."""
        self._holders = 0
        """Number of sequences that hold blocks: those that were admitted and not freed."""
        self._discards: list[ContentKey] = []
        """Keys of blocks that the connector must report to the kvbm as wrong."""
        self._shared: Counter[int] = Counter()
        """How many shares each slot belongs to."""
        self.is_shared: Callable[[ContentKey], bool] = lambda _key: False
        """Whether another engine has read this block, and all before it, or will as soon as it is there."""
        self._events: list[PoolEvent] = []
        self.changes = 0
        """Counts the connector's calls that may let a scheduler go on that found nothing to compute."""

    # --- for the scheduler: blocks of sequences

    def consider(self, waiting: Seq[Sequence], tokens_per_s: float, now_s: float) -> None:
        """Let the first of these sequences ask the kvbm for blocks, as far as there is room for all of them by
        `has_room_for`'s measure. Blocks that came earlier would have nowhere to go. A sequence that is left out now is
        considered when there is room."""
        if not self.onboarding.enabled:
            return
        room, near = self._pool.available - self._holders, 0
        for sequence in waiting[: self._look_ahead]:
            # For a sequence that was considered before, assume the most: to look it up in each step would cost more.
            takes = sequence.blocks_needed if sequence.looked_up else self._blocks_taken(sequence)
            room -= self.onboarding.blocks_reserved(sequence) or takes
            if room < 0:
                break
            near += 1
        self.onboarding.consider(waiting[:near], tokens_per_s, now_s)

    def has_room_for(self, sequence: Sequence, reserved: int) -> bool:
        """Whether a waiting sequence can be admitted and leave `reserved` blocks to others, and to each sequence that
        holds blocks the one that it may grow into."""
        return self._blocks_taken(sequence) + reserved + self._holders <= self._pool.available

    def uncached_tokens(self, sequence: Sequence) -> int:
        """Return how many of its tokens would be computed now."""
        return len(sequence.tokens) - self._pool.longest_prefix(sequence.reusable_keys) * sequence.block_size

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence blocks for all its tokens: cached ones as far as possible, then blank ones."""
        self._holders += 1
        self.reuse_cached(sequence)
        self._allocate(sequence, sequence.blocks_needed - len(sequence.blocks))

    def grow(self, sequence: Sequence) -> bool:
        """Give the sequence one more blank block, if need be one that is held for a sequence that waits for the kvbm.
        Return False if there is none."""
        while not self._pool.available:
            if not self.onboarding.reclaim():
                return False
        self._allocate(sequence, 1)
        return True

    def reuse_cached(self, sequence: Sequence) -> None:
        """Replace the blank blocks after the computed ones by those that the prefix cache has by now."""
        size = self._block_size
        if sequence.computed != sequence.stored * size:
            return  # in the middle of a block
        before = sequence.stored
        slots = self._pool.acquire_prefix(sequence.reusable_keys[before:])
        sequence.stored += len(slots)
        sequence.work.start += len(slots) * size
        for blank in sequence.blocks[before : sequence.stored]:
            self._pool.release(blank)
        sequence.blocks[before : sequence.stored] = slots
        if sequence.submit.prefill_only and self.offloading.queues:
            # The worker that decodes finds the prompt at the kvbm, which may have lost what this device still has.
            for index in range(before, sequence.stored):
                self.offloading.enqueue(sequence.content(index))
        if not sequence.begun:
            sequence.count_cached(before)

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Put the blocks that have become full into the prefix cache."""
        for index in range(sequence.stored, sequence.computed // self._block_size):
            content = sequence.content(index)
            if sequence.no_reuse:  # a cached block with this key may come from the same fault as the wrong one
                self._events.extend(self._pool.forget(content.key))
            slot, events = self._pool.store(sequence.blocks[index], content)
            sequence.blocks[index] = slot
            self._events.extend(events)
            if events:
                self.notes.add(events[0].content.key, "computed for request {}", sequence.request)
                if self.offloading.queues:
                    self.offloading.enqueue(events[0].content)
            sequence.stored += 1

    def free(self, sequence: Sequence) -> None:
        """Release the sequence's blocks."""
        self._holders -= 1
        self._pool.release_prefix(sequence.blocks)
        sequence.blocks.clear()
        sequence.work.start = sequence.stored = 0
        if not sequence.begun:
            sequence.forget_cached()

    def forget(self, sequence: Sequence) -> None:
        """Take the sequence's full blocks out of the prefix cache, here and at the kvbm: they may be wrong."""
        keys = sequence.keys[: sequence.stored]
        for key in reversed(keys):
            self._events.extend(self._pool.forget(key))
            self.notes.add(key, "forgotten: the numbers of request {} were not finite", sequence.request)
        self.discard(keys)

    def clear(self) -> None:
        """Forget all blocks, while no sequence holds any: `drain_events` tells nothing of it. Copies that are under way
        go on, and bring nothing into the cache. The kvbm keeps what it has."""
        assert not self._holders
        self.onboarding.clear()
        self._pool.clear()
        self.notes.add(EVERY_BLOCK, "forgotten with all others: the engine slept, or its cache was cleared")
        self.changes += 1

    def allocate_blocks(self, count: int) -> list[int]:
        """Return blank blocks that belong to no sequence. Empty if not as many are available."""
        if self._pool.available < count:
            return []
        slots, evicted = self._pool.allocate(count)
        self._evicted(evicted, "a probe of the device")
        return slots

    def free_blocks(self, slots: Iterable[int]) -> None:
        """Release blocks of `allocate_blocks`."""
        for slot in slots:
            self._pool.release(slot)

    def _blocks_taken(self, sequence: Sequence) -> int:
        """How many of the available blocks the sequence's admission takes."""
        return sequence.blocks_needed - self._pool.held_prefix(sequence.reusable_keys)

    def _allocate(self, sequence: Sequence, count: int) -> None:
        slots, evicted = self._pool.allocate(count)
        sequence.blocks.extend(slots)
        if evicted:
            self._evicted(evicted, f"request {sequence.request}")

    def _evicted(self, evicted: Seq[ContentEvicted], needed_for: str) -> None:
        self._events.extend(evicted)
        keys = [event.content.key for event in evicted]
        self.notes.add_all(keys, "evicted as the least recently used, for {}", needed_for)

    # --- for the connector: blocks exchanged with a kvbm

    def set_connected(self, connected: bool) -> None:
        """A kvbm is there, or no longer. Without one no sequence waits for it: those that did become abandoned fetches,
        each of which still ends with `end_fetch`, after `end_loads` for each block that is loading. Nothing is offered
        then."""
        self.onboarding.set_enabled(connected)
        self.offloading.set_enabled(connected)
        self._discards.clear()
        self.changes += 1

    def fetch_changes(self) -> tuple[list[FetchRequest], list[int]]:
        """Return what to fetch, and the numbers of fetches that no sequence waits for any longer, both new since the
        last call. Called at the latest after each step was scheduled.

        None of the abandoned fetches has ended. Copies for them that have not begun are not worth making; every slot
        that `begin_load` gave still needs its `end_loads`.
        """
        waiting = self.onboarding.waiting
        new = self.onboarding.new_fetches()
        if self.onboarding.waiting < waiting:
            self.changes += 1
        return new, self.onboarding.abandoned_fetches()

    def begin_load(self, number: int, first: int, count: int, _found: int) -> list[int]:
        """Return device slots for blocks first … first + count - 1 of fetch `number`, leading ones only. They are
        fewer, or none, if there is no room, if the fetch was abandoned, or if a block before them got no
        slot. How many the kvbm has in all does not matter here."""
        slots, evicted = self.onboarding.begin_load(number, first, count, self._holders)
        self._evicted(evicted, "a block from the kvbm")
        self.changes += 1
        return slots

    def end_loads(self, number: int, first: int, good: Seq[bool], disk: bool, sharer: str = "") -> None:
        """The copies of blocks first … first + len(good) - 1 of fetch `number` have ended, each good or not; `sharer`
        is the worker that shared them, empty for the kvbm. Called once for each slot of `begin_load`, in any order,
        also after the attempt has ended."""
        stored = self.onboarding.end_loads(number, first, good, disk)
        self._events.extend(stored)
        keys = [event.content.key for event in stored]
        if sharer:
            self.offloading.mark_shared(keys, sharer)
            self.notes.add_all(keys, "shared by the prefill worker {}", sharer)
        else:
            self.offloading.mark_remote(keys)
            self.notes.add_all(keys, "loaded from {}", "the kvbm's disk" if disk else "the kvbm's host memory")
        self.changes += 1

    def end_fetch(self, number: int, round_trip_s: float) -> None:
        """Nothing more comes for fetch `number`, and all its loads have ended. Called exactly once for each fetch.
        `round_trip_s` is the time from the question to the kvbm's first answer, or until no answer was awaited any
        longer. 0 if not known."""
        self.onboarding.end_fetch(number, round_trip_s)
        self.changes += 1

    def offer_shared(self, sharer: str) -> None:
        """The engine of the worker `sharer` shares nothing any more, and may not have stored what it shared: offer that
        to the kvbm."""
        self.offloading.enqueue_shared(sharer)

    def offers(self, most: int) -> list[Content]:
        """Return at most `most` blocks to offer to the kvbm, parents first. An offer holds nothing."""
        return self.offloading.offers(most)

    def pin(self, keys: Seq[ContentKey]) -> list[int | None]:
        """Return the device slots with these blocks, each held for a copy until `unpin`. None if the block was evicted,
        or its room is needed."""
        return self.offloading.pin(keys, self._holders)

    def declined(self, keys: Seq[ContentKey]) -> None:
        """The kvbm has these offered blocks already, or does not take them."""
        self.offloading.declined(keys)
        self.changes += 1

    def asked_again(self, keys: Seq[ContentKey]) -> None:
        """The kvbm is asked once more for these blocks, which came too late. `pin` or `declined` follows for each."""
        self.offloading.asked_again(keys)

    def unpin(self, slots: Seq[int]) -> None:
        """The copies that read these slots have ended. Called exactly once for each pin, parents before children."""
        self.offloading.unpin(slots)
        self.changes += 1

    def are_handed_over(self, keys: Seq[ContentKey]) -> bool:
        """Whether the engine that goes on with these blocks gets them: it reads them, or the kvbm has them."""
        return not keys or self.is_shared(keys[-1]) or not self.offloading.owes(keys)

    def share(self, keys: Seq[ContentKey]) -> list[int]:
        """Return the device slots of the leading ones of these blocks, as far as they are there and room is left
        without them. They stay as they are until `take_back`."""
        slots: list[int] = []
        for key in keys:
            slot = self._pool.find(key)
            if slot is None or (self._pool.state(slot) == "cached" and self._pool.available <= self._holders):
                break
            self._pool.hold_for_copy(slot)
            slots.append(slot)
        self._shared.update(slots)
        return slots

    @property
    def shared_blocks(self) -> int:
        """How many blocks are shared."""
        return len(self._shared)

    def take_back(self, slots: Seq[int]) -> None:
        """The copies of shared slots have ended. Called exactly once for each slot of `share`."""
        for slot in slots:
            assert self._shared[slot] > 0, f"slot {slot} is not shared"
            self._shared[slot] -= 1
            if not self._shared[slot]:
                del self._shared[slot]
        self._pool.release_copies(slots)
        self.changes += 1

    def discard(self, keys: Seq[ContentKey]) -> None:
        """The kvbm may have these blocks, and they are or may be wrong."""
        if self.onboarding.enabled:
            self._discards.extend(keys)

    def new_discards(self) -> list[ContentKey]:
        """Return the keys of blocks that are or may be wrong, new since the last call: the kvbm must no longer hand
        them out."""
        discards, self._discards = self._discards, []
        return discards

    # --- questions

    @property
    def digest(self) -> int:
        """XOR of the event hashes of all blocks in the prefix cache."""
        return self._pool.digest

    @property
    def has_events(self) -> bool:
        """Whether `drain_events` would return any."""
        return bool(self._events)

    def drain_events(self) -> list[PoolEvent]:
        """Return the blocks that were stored and evicted since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[Content]:
        """Return every block in the prefix cache, parents first."""
        return self._pool.snapshot()

    def places(self, key_end: bytes) -> list[str]:
        """Return where a block is, by the end of its key, and why it stays or goes. O(blocks) for less than a whole
        key."""
        slot = self._pool.find_end(key_end)
        if slot is None:
            return ["not on the device"]
        sequences, copies, before = self._pool.uses(slot)
        holders = [f"{sequences} running or loading requests" * bool(sequences), f"{copies} copies" * bool(copies)]
        if any(holders):
            return [f"on the device, and stays while held by {' and '.join(filter(None, holders))}"]
        statistics = self._pool.statistics()
        return [
            f"on the device, cached: {statistics.free} free blocks and {before} less recently used ones of"
            f" {statistics.cached} cached are taken before it"
        ]

    def statistics(self) -> PoolStatistics:
        """Return the numbers of blocks by state, in O(1)."""
        return self._pool.statistics()

    def validate(self, running: Seq[Sequence], others: Iterable[int]) -> None:
        """Raise AssertionError if the blocks contradict themselves. O(everything). `running` are the sequences that
        hold blocks, `others` the slots of `allocate_blocks`."""
        self._pool.validate()
        self.onboarding.validate()
        self.offloading.validate()
        assert self._holders == len(running)
        held = {*others, *self.offloading.pinned(), *self._shared}
        held.update(*self.onboarding.held())
        for sequence in running:
            held.update(sequence.blocks)
            assert len(sequence.blocks) == len(set(sequence.blocks))
            assert len(sequence.blocks) * self._block_size >= sequence.computed
            assert sequence.stored == sequence.computed // self._block_size
            for index, slot in enumerate(sequence.blocks):
                content = self._pool.content(slot)
                known = content is not None or self._pool.is_forgotten(slot)
                assert known == (index < sequence.stored), f"block {index} of {sequence.name}"
                assert content is None or content.key == sequence.keys[index]
        blocks = self._pool.statistics()
        assert len(held) == blocks.held + blocks.loading, "a held block has no holder"
