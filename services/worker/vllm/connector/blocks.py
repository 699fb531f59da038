"""VllmBlocks: vLLM's blocks as the connector's deciders see them. Pure: vLLM's pool is used through a protocol.

                find: None, "ask again"          find: N tokens                  place
    a request ─────────────────────────▶ asked ────────────────────────▶ found ─────────▶ loading ──▶ EndLoad
                                           │ nothing found; no answer in time; kvbm lost; the request ended
                                           ▼
                                         nothing: vLLM computes the blocks

A request that misses a block which another one is loading is asked again until that load has ended.

vLLM names a cached block by a strong hash of its content, a new object each time that it caches one. So a block that
was offered is still that block, computed and not allocated again, as long as it has the same hash object. Only blocks
are offered whose step vLLM has processed: their bytes are there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import count, islice

from msgspec import Struct

from services.worker.contracts.device_blocks import FetchRequest
from services.worker.scheduler.owed_blocks import OwedBlocks
from services.worker.vllm.connector.chain import TokenChain
from services.worker.vllm.connector.expected import ExpectedPrompts, HashedRequest
from services.worker.vllm.connector.orders import EndLoad
from services.worker.vllm.connector.pool import PoolBlock, VllmPool
from shared.blocks import Content
from shared.hashing import ContentKey

MOST_OFFERS = 4096
"""Most blocks that wait to be offered; over it the oldest is not stored."""
MOST_KNOWN = 1 << 17
"""Most keys that are remembered as offered to the kvbm, or loaded from it; over it the oldest may be offered again."""
MOST_UNPLACED = 8
"""Most questions at once whose blocks vLLM has not allocated; further requests are asked again."""
LOAD_S = 30.0
"""Seconds that a load may take; then what is missing is computed."""
MOST_LOOKED_AT = 512
"""Most blocks of a request that are looked at in one step, so that long prompts do not hold up a step."""
HOLD_S = 2.0
"""Seconds for which an answer counts while vLLM has no room for its blocks; then the kvbm is asked again."""
MOST_QUESTIONS = 8
"""Most questions of one request: it is preempted, a load fails, or its cached prefix on the device changes. Questions
that are asked again because vLLM has no room are not counted."""
NEVER = 1 << 62
"""A number of tokens that no request reaches."""
RESERVE_SHARE = 1 / 16
"""Share of the blocks that stay free for requests: no free block beyond it is held for a copy."""


class _Lookup(Struct, eq=False):
    """One question to the kvbm, for one request."""

    number: int
    request: str
    first: int
    """Index of the first block that the device has not."""
    keys: list[ContentKey]
    asked_s: float
    found: int | None = None
    """Blocks that the kvbm has. None means no answer yet."""
    found_s: float = 0.0
    expired: bool = False
    """Its answer was given up, since vLLM had no room."""
    abandoned: bool = False
    slots: list[int] = []
    """Device blocks that it loads into. Empty if vLLM has allocated none."""
    placed_s: float = 0.0
    begun: int = 0
    """Number of them for which copies were ordered."""
    end_sent: bool = False

    @property
    def waits(self) -> bool:
        """Whether vLLM waits for the end of its load."""
        return bool(self.slots) and not self.end_sent


class _Request(Struct, eq=False):
    chain: TokenChain
    prefix: int = -1
    """Tokens that were computed when it was scheduled first, or again after a preemption. -1 if it was not. The prefix
    that it found in vLLM's cache may be computed in a step that is under way; that has ended when its own first step
    has."""
    offered: int = 0
    """Leading blocks that were offered, or need not be."""
    questions: int = 0
    lookup: _Lookup | None = None


class VllmBlocks:
    """The blocks of one engine, as `services.worker.contracts.device_blocks.DeviceBlocks`."""

    def __init__(
        self, pool: VllmPool, block_size: int, clock: Callable[[], float], *, wait_s: float, offers: bool = True
    ) -> None:
        """A question waits at most `wait_s` for its first answer. `offers` False: nothing is stored."""
        self._pool = pool
        self._block_size = block_size
        self._clock = clock
        self._wait_s = wait_s
        self._stores = offers
        self._reserve = int(RESERVE_SHARE * len(pool.blocks))
        self._connected = False
        self.expected = ExpectedPrompts(pool, block_size, self._reserve)
        self._numbers = count(1)
        self._requests: dict[str, _Request] = {}
        self._lookups: dict[int, _Lookup] = {}
        """Number → lookup whose fetch has not ended."""
        self._new: deque[_Lookup] = deque()
        """Lookups that the connector has not taken up."""
        self._abandoned: list[int] = []
        self._ends: list[EndLoad] = []
        self._discards: list[ContentKey] = []
        self._offers: deque[Content] = deque(maxlen=MOST_OFFERS)
        self._sources: OrderedDict[ContentKey, tuple[PoolBlock, object]] = OrderedDict()
        """Offered key → the block and its hash in vLLM's cache; the newest offer last."""
        self._known: OrderedDict[ContentKey, None] = OrderedDict()
        """Keys that were offered to the kvbm or came from it."""
        self._offered: OrderedDict[int, tuple[object, Content]] = OrderedDict()
        """Device block → its hash in vLLM's cache and its content, of those that were offered to any kvbm; the newest
        last."""
        self._owed = OwedBlocks()
        self._pinned: dict[int, list[ContentKey]] = {}
        """Device block → the blocks that copies read there."""
        self._hand_overs: dict[str, set[ContentKey]] = {}
        """Name of a hand-over → those of its blocks that are on their way to the kvbm."""
        self.dropped = 0
        """Blocks that were not offered since too many waited, since the start."""
        self.late = 0
        """Questions that got no answer in time, since the start."""

    # --- for the scheduler half: requests

    def track(self, request: str, chain: TokenChain) -> None:
        """A request has come whose blocks may be loaded and stored."""
        self._requests[request] = _Request(chain)

    def find(self, request: str, tokens: int, computed: int) -> int | None:
        """Return how many tokens can be loaded after the `computed` ones that the device has, of a request with
        `tokens` tokens: whole blocks, and never the last token, which must be computed. None means that it must be
        asked again."""
        entry = self._requests.get(request)
        first, full = computed // self._block_size, (tokens - 1) // self._block_size
        if entry is None or not self._connected or full <= first:
            return 0
        now_s, lookup = self._clock(), entry.lookup
        if lookup is not None and (lookup.slots or lookup.first != first):
            self._abandon(lookup)  # what it loaded is gone; or the device has another prefix now
            lookup = entry.lookup = None
        elif lookup is not None and lookup.expired:
            lookup = entry.lookup = None
            entry.questions -= 1
        if lookup is None:
            if entry.questions >= MOST_QUESTIONS:
                return 0
            if self._unplaced >= MOST_UNPLACED:
                return None
            keys = entry.chain.keys(full)[first:]
            if not self._is_loading(keys[0]):
                entry.questions += 1
                entry.lookup = lookup = _Lookup(next(self._numbers), request, first, keys, now_s)
                self._new.append(lookup)
            return None
        if lookup.found is None and now_s - lookup.asked_s >= self._wait_s:
            self.late += 1
            self._abandon(lookup)
            lookup.found = 0
        if lookup.found is None or (lookup.found and self._is_loading(lookup.keys[0])):
            return None
        return lookup.found * self._block_size

    def find_expected(self, request: HashedRequest, tokens: int, computed: int) -> None:
        """Ask for the blocks of an expected prompt, as `find` does for a request."""
        if self._connected:
            self.expected.find(self._numbers, request, tokens, computed)

    def place(self, request: str, block_ids: Sequence[int], tokens: int) -> None:
        """vLLM has allocated blocks for the request, of which `tokens` tokens are to be loaded as `find` said. 0 if
        there is none."""
        entry = self._requests.get(request)
        if entry is not None:
            entry.prefix = -1
        if entry is None or entry.lookup is None:
            assert not tokens, f"request {request} is to load what was not found"
            return
        lookup = entry.lookup
        if lookup.slots:
            return  # vLLM says so again after the load
        if not tokens:
            self._abandon(lookup)
            entry.lookup = None
            return
        blocks, rest = divmod(tokens, self._block_size)
        assert not rest, f"vLLM wants {tokens} tokens, which are no whole blocks"
        assert lookup.found is not None
        assert blocks <= lookup.found
        lookup.slots = list(block_ids[lookup.first : lookup.first + blocks])
        assert len(lookup.slots) == blocks
        lookup.placed_s = self._clock()

    def placed_in_memory(self, request: str) -> int:
        """Return how many tokens of the request's load are copied from memory: those whose copies were ordered at
        once. The others are being read from disk."""
        entry = self._requests.get(request)
        lookup = None if entry is None else entry.lookup
        return 0 if lookup is None else lookup.begun * self._block_size

    def offer_computed(self, request: str, tokens: int, blocks: Callable[[], Sequence[PoolBlock]]) -> int:
        """The first `tokens` tokens of the request are computed, and the step that did so is processed. `blocks`
        returns the request's blocks. Return the number of tokens from which on this must be called again; after a
        `place` it must be called at once."""
        entry = self._requests.get(request)
        if entry is None:
            return NEVER
        if not 0 <= entry.prefix <= tokens:
            entry.prefix = tokens
        full = tokens // self._block_size
        if tokens == entry.prefix:
            return tokens + 1
        if full > entry.offered and self._connected and self._stores:
            most = entry.offered + MOST_LOOKED_AT
            self._offer_blocks(entry, min(full, most), blocks)
            if full > most:
                return tokens
        return (full + 1) * self._block_size

    def _offer_blocks(self, entry: _Request, full: int, blocks: Callable[[], Sequence[PoolBlock]]) -> None:
        missing = [index for index in range(entry.offered, full) if entry.chain.key(index) not in self._known]
        entry.offered = full
        if not missing:
            return
        held = blocks()
        for index in missing:
            block = held[index] if index < len(held) else None
            if block is not None and not block.is_null and block.block_hash is not None:
                self._offer(block, entry.chain.content(index))

    def _offer(self, block: PoolBlock, content: Content) -> None:
        """The content waits to be offered. Its block is computed, and in vLLM's cache."""
        self._sources[content.key] = block, block.block_hash
        self._sources.move_to_end(content.key)
        if len(self._sources) > 2 * MOST_OFFERS:
            self._sources.popitem(last=False)
        if len(self._offers) == MOST_OFFERS:
            self._known.pop(self._offers[0].key, None)
            self._owed.settle(self._offers[0].key)
            self.dropped += 1
        self._offers.append(content)
        self._owed[content.key] += 1
        self._know(content.key)
        self._offered[block.block_id] = block.block_hash, content
        self._offered.move_to_end(block.block_id)

    def _offer_again(self) -> None:
        """Offer the newest blocks that were offered before and are still there."""
        before = reversed(self._offered.items())
        still = (
            (block, content) for at, (name, content) in before if (block := self._pool.blocks[at]).block_hash is name
        )
        for block, content in reversed(list(islice(still, MOST_OFFERS))):
            self._offer(block, content)

    def forget_offered(self) -> None:
        """The blocks that were offered so far have another name from now on, or none: no link is offered them again."""
        self._offered.clear()

    def forget(self, request: str) -> None:
        """The request has ended. A load of it that is under way still ends with EndLoad."""
        self.expected.forget(request)
        entry = self._requests.pop(request, None)
        if entry is not None and entry.lookup is not None:
            self._abandon(entry.lookup)

    def hand_over(self, request: str, name: str, tokens: int) -> None:
        """Another engine needs the full blocks among the request's first `tokens` tokens. `take_stored` returns `name`
        once none of them is on its way to the kvbm; the kvbm may lack some even then."""
        entry = self._requests.get(request)
        keys = [] if entry is None else entry.chain.keys(tokens // self._block_size)
        self._hand_overs[name] = {key for key in keys if key in self._owed}

    def take_stored(self) -> list[str]:
        """Return the names of hand-overs that have nothing on its way to the kvbm any longer, each once."""
        if not self._hand_overs:
            return []
        stored = [name for name, keys in self._hand_overs.items() if keys.isdisjoint(self._owed)]
        for name in stored:
            del self._hand_overs[name]
        return stored

    def take_ends(self) -> list[EndLoad]:
        """Return the ends of loads since the last call. The copies that they wait for were ordered before."""
        ends, self._ends = self._ends, []
        return ends

    @property
    def waiting(self) -> bool:
        """Whether blocks wait to be offered, a load waits for its end, or the connector has questions to give up."""
        return bool(self._offers or self._ends or self._abandoned) or any(
            lookup.waits for lookup in self._lookups.values()
        )

    # --- for the connector: DeviceBlocks

    def set_connected(self, connected: bool) -> None:
        self._connected = connected
        self._offers.clear()
        self._sources.clear()
        self._known.clear()
        self._owed.clear()
        self._discards.clear()
        for entry in self._requests.values():
            entry.offered = 0
        if not connected:
            while self._new:
                self._end(self._new.popleft())
            for lookup in self._lookups.values():
                lookup.abandoned = True
        elif self._stores:
            self._offer_again()

    def offers(self, most: int) -> list[Content]:
        return [self._offers.popleft() for _ in range(min(most, len(self._offers)))]

    def pin(self, keys: Sequence[ContentKey]) -> list[int | None]:
        slots: list[int | None] = []
        for key in keys:
            block, name = self._sources.get(key, (None, None))
            if block is None or block.block_hash is not name or self._too_few_free(block):
                self._sources.pop(key, None)
                self._known.pop(key, None)  # it is offered again when it is computed again
                self._owed.settle(key)
                slots.append(None)
                continue
            self._pool.touch([block])
            self._pinned.setdefault(block.block_id, []).append(key)
            slots.append(block.block_id)
        return slots

    def declined(self, keys: Sequence[ContentKey]) -> None:
        for key in keys:
            self._owed.settle(key)

    def asked_again(self, keys: Sequence[ContentKey]) -> None:
        self._owed.update(keys)

    def unpin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._owed.settle(self._pinned[slot].pop(0))
            if not self._pinned[slot]:
                del self._pinned[slot]
        self._pool.free_blocks([self._pool.blocks[slot] for slot in reversed(slots)])

    def fetch_changes(self) -> tuple[list[FetchRequest], list[int]]:
        expected, forgotten = self.expected.changes()
        if not (self._new or self._lookups or self._abandoned):
            return expected, forgotten
        self._expire()
        new = [FetchRequest(lookup.number, lookup.keys) for lookup in self._new]
        self._lookups.update((lookup.number, lookup) for lookup in self._new)
        self._new.clear()
        abandoned, self._abandoned = self._abandoned, []
        return [*new, *expected], [*(number for number in abandoned if number in self._lookups), *forgotten]

    def begin_load(self, number: int, first: int, count: int, found: int) -> list[int] | None:
        if number in self.expected:
            return self.expected.begin_load(number, first, count)
        lookup = self._lookups[number]
        if lookup.abandoned:
            return []
        if lookup.found is None:
            lookup.found, lookup.found_s = min(found, len(lookup.keys)), self._clock()
            for key in lookup.keys[lookup.found :]:
                self._known.pop(key, None)  # the kvbm has lost it
        if not lookup.slots:
            return None
        assert first == lookup.begun
        slots = lookup.slots[first : first + count]
        lookup.begun += len(slots)
        if lookup.begun == len(lookup.slots) and lookup.waits:
            self._send_end(lookup)
        return slots

    def end_loads(self, number: int, first: int, good: Sequence[bool], _disk: bool, _sharer: str = "") -> None:
        if number in self.expected:
            self.expected.end_loads(number, first, good)
            return
        keys = self._lookups[number].keys
        for index, is_good in enumerate(good, first):
            if is_good:
                self._know(keys[index])

    def offer_shared(self, _sharer: str) -> None:
        """No engine shares blocks to vLLM."""

    def end_fetch(self, number: int, _round_trip_s: float) -> None:
        if number in self.expected:
            self.expected.end_fetch(number)
            return
        lookup = self._lookups.pop(number)
        if lookup.found is None and not lookup.abandoned:
            for key in lookup.keys:
                self._known.pop(key, None)  # the kvbm has none of them
        self._end(lookup)

    def discard(self, keys: Sequence[ContentKey]) -> None:
        for key in keys:
            self._known.pop(key, None)
        if self._connected:
            self._discards.extend(keys)

    def new_discards(self) -> list[ContentKey]:
        discards, self._discards = self._discards, []
        return discards

    # --- inside

    def _expire(self) -> None:
        """Abandon answers that vLLM has found no room for, so that others get their turn, and loads that take too
        long."""
        now_s = self._clock()
        for lookup in self._lookups.values():
            held = bool(lookup.found) and not lookup.slots and now_s - lookup.found_s >= HOLD_S
            if held or (lookup.waits and now_s - lookup.placed_s >= LOAD_S):
                self._abandon(lookup)
                if held:
                    lookup.found, lookup.expired = None, True

    def _is_loading(self, key: ContentKey) -> bool:
        return any(lookup.waits and not lookup.abandoned and key in lookup.keys for lookup in self._lookups.values())

    @property
    def _unplaced(self) -> int:
        return len(self._new) + sum(not lookup.slots and not lookup.abandoned for lookup in self._lookups.values())

    def _abandon(self, lookup: _Lookup) -> None:
        if lookup in self._new:
            self._new.remove(lookup)
        elif lookup.number in self._lookups and not lookup.abandoned:
            lookup.abandoned = True
            self._abandoned.append(lookup.number)

    def _end(self, lookup: _Lookup) -> None:
        if lookup.waits:
            self._send_end(lookup)
        if not lookup.slots:
            lookup.found = 0

    def _send_end(self, lookup: _Lookup) -> None:
        lookup.end_sent = True
        self._ends.append(EndLoad(lookup.request, lookup.slots, lookup.slots[lookup.begun :]))

    def _know(self, key: ContentKey) -> None:
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def _too_few_free(self, block: PoolBlock) -> bool:
        return not block.ref_cnt and self._pool.get_num_free_blocks() <= self._reserve

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert len(self._sources) <= 2 * MOST_OFFERS
        assert len(self._known) <= MOST_KNOWN
        for number, lookup in self._lookups.items():
            assert number == lookup.number
            assert lookup.begun <= len(lookup.slots)
            assert not lookup.end_sent or lookup.slots
        assert not any(lookup.number in self._lookups for lookup in self._new)
        assert self._connected or not (self._new or self._offers)
        assert len(self._offered) <= len(self._pool.blocks)
        self.expected.validate()
        assert all(times > 0 for times in self._owed.values())
        assert {content.key for content in self._offers} <= self._owed.keys()
