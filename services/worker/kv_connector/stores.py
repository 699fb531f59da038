"""Stores: blocks on their way from the device to the kvbm. Pure.

    collected ──Store──▶ asked ──Granted──▶ saving ──Copied──▶ ending ──Settled──▶ over
        64 blocks,        │                   │                  ▲
        or 20 ms          │ nothing granted   │ nothing good,    │ Commit of what was copied
                          ▼                   ▼ or too late      │
                         over               ending: Abort ───────┘

A block's device slot is held by its copy alone, from Granted to Copied; a block that was evicted before is not stored.
Where an answer does not come, or copies fail, nothing is asked again: the engine attaches again, which ends every
ticket (`LinkLost`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from msgspec import Struct

from services.worker.device_blocks import DeviceBlocks
from services.worker.kv_connector.actions import Action, AskKvbm, CancelBatch, LinkLost, SaveBatch, unpack_slots
from services.worker.mover import Copied, Copy
from shared.blocks import Content
from shared.hashing import pack_hashes, pack_tokens
from shared.kvbm_messages import ABORT, COMMIT, STORE, Abort, Commit, Granted, KvbmRefused, Settled, Store, StoreBlock

BATCH_BLOCKS = 64
"""Most blocks of one Store: some 10 KB, and a few milliseconds' copies."""
COLLECT_S = 0.02
"""Seconds that the first of a Store's blocks waits for others, as a rule."""
MOST_STORES = 8
"""Most Stores that are asked, saving or ending at once."""
COPY_SHARE = 0.75
"""Share of a ticket's time after which no copy begins, so that the Commit arrives in time."""


class _AskedStore(Struct):
    sent_s: float
    blocks: list[Content]


class _Save(Struct):
    ticket: int
    pool_slots: list[int]
    device_slots: list[int]
    ends_s: float
    """When the ticket's time is over, at the earliest."""


class Stores:
    """The stores of one engine. Between `open` and `close` there is a kvbm to ask; copies may end later."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        numbers: Iterator[int],
        batches: Iterator[int],
        most_blocks: int,
        *,
        checksums: bool = False,
        collect_s: float = COLLECT_S,
    ) -> None:
        """`numbers` names the requests, `batches` the mover's batches. `most_blocks` bounds the device blocks that are
        asked for or held at once. With `checksums` the mover makes one for each block."""
        assert most_blocks > 0
        self._collect_s = collect_s
        self._checksums = checksums
        self._blocks = blocks
        self._numbers = numbers
        self._batches = batches
        self._most_blocks = most_blocks
        self._owner = ""
        self._pool_slots = 0
        self._batch_blocks = 0
        """Most blocks of one Store; 0: closed."""
        self._collected: list[Content] = []
        self._send_s = inf
        self._asked: dict[int, _AskedStore] = {}
        """Number of a request → the Store that awaits its answer."""
        self._saves: dict[int, _Save] = {}
        """Batch of the mover → the save that it copies."""
        self._ending: dict[int, int] = {}
        """Number of a Commit or Abort → how many blocks it commits."""
        self._under_way = 0
        """Blocks asked for or held."""

    def open(self, owner: str, pool_slots: int, blocks_per_request: int) -> None:
        """The kvbm has attached this owner, and will grant it slots below `pool_slots`."""
        assert self.idle
        assert not self._asked
        assert not self._ending
        self._owner = owner
        self._pool_slots = pool_slots
        self._batch_blocks = min(BATCH_BLOCKS, blocks_per_request, self._most_blocks)

    def close(self) -> list[Action]:
        """There is no kvbm to ask any longer: no request is open after this."""
        self._batch_blocks = 0
        self._collected = []
        self._send_s = inf
        self._under_way -= sum(len(asked.blocks) for asked in self._asked.values())
        self._asked.clear()
        self._ending.clear()
        return [CancelBatch(batch) for batch in self._saves]

    @property
    def idle(self) -> bool:
        """Whether no copy is under way."""
        return not self._saves

    @property
    def collecting(self) -> bool:
        """Whether blocks wait to be asked for."""
        return bool(self._collected)

    @property
    def awaited(self) -> frozenset[int]:
        """Numbers of the Stores whose answers have not come."""
        return frozenset(self._asked)

    @property
    def wait_until_s(self) -> float | None:
        """When `step` will have something to do without any event."""
        return self._send_s if self._collected and not self._full else None

    @property
    def _full(self) -> bool:
        return len(self._asked) + len(self._saves) + len(self._ending) >= MOST_STORES

    def step(self, now_s: float) -> list[Action]:
        """Collect offered blocks, and ask for slots where there are enough blocks. Called after each step: it takes
        some 0.5 µs while nothing is offered."""
        if self._full:
            return []
        most = self._batch_blocks
        if not self._collected:
            if self._under_way + most > self._most_blocks:
                return []
            self._send_s = now_s + self._collect_s
        if len(self._collected) < most:
            self._collected += self._blocks.offers(most - len(self._collected))
        if self._collected and (len(self._collected) >= most or now_s >= self._send_s):
            return [self._send(now_s)]
        return []

    def _send(self, now_s: float) -> AskKvbm:
        blocks, self._collected = self._collected, []
        body = [StoreBlock(block.key, block.parent, block.tokens, block.lora, block.salt) for block in blocks]
        number = next(self._numbers)
        self._asked[number] = _AskedStore(now_s, blocks)
        self._under_way += len(blocks)
        return AskKvbm(number, "store", STORE.encode(Store(self._owner, body)))

    def granted(self, number: int, reply: Granted | KvbmRefused) -> list[Action]:
        """A Store was answered. Raise LinkLost where the answer does not fit it."""
        asked = self._asked.pop(number)
        self._under_way -= len(asked.blocks)
        if isinstance(reply, KvbmRefused) or not reply.ticket:
            self._blocks.declined([block.key for block in asked.blocks])
            return []
        granted, pool_slots = reply.blocks, unpack_slots(reply.slots, self._pool_slots)
        indices = set(granted)
        if not len(granted) == len(indices) == len(pool_slots) or not indices <= set(range(len(asked.blocks))):
            raise LinkLost(f"{len(pool_slots)} slots were granted for {granted} of {len(asked.blocks)} blocks")
        self._blocks.declined([block.key for index, block in enumerate(asked.blocks) if index not in indices])
        pinned = self._blocks.pin([asked.blocks[index].key for index in granted])
        pairs = [(pool, device) for pool, device in zip(pool_slots, pinned, strict=True) if device is not None]
        if not pairs:
            return [self._abort(reply.ticket)]
        save = _Save(
            ticket=reply.ticket,
            pool_slots=[pool for pool, _ in pairs],
            device_slots=[device for _, device in pairs],
            ends_s=asked.sent_s + reply.time_left_s,
        )
        batch = next(self._batches)
        self._saves[batch] = save
        self._under_way += len(pairs)
        copies = [Copy(pool, device, checksum=0 if self._checksums else None) for pool, device in pairs]
        return [SaveBatch(batch, copies, asked.sent_s + COPY_SHARE * reply.time_left_s)]

    def owns(self, batch: int) -> bool:
        """Whether the mover's batch is a save."""
        return batch in self._saves

    def saved(self, copied: Copied, now_s: float) -> list[Action]:
        """A batch has ended: commit what was copied."""
        save = self._saves.pop(copied.batch)
        self._blocks.unpin(save.device_slots)
        self._under_way -= len(save.device_slots)
        if copied.failed or not self._batch_blocks:
            # The next attach ends its ticket. An Abort would free the slots at once for other blocks, though a GPU that
            # is lost may still write to them.
            return []
        written = [slot for slot, good in zip(save.pool_slots, copied.good, strict=True) if good]
        if not written or now_s >= save.ends_s:
            return [self._abort(save.ticket)]
        commit = Commit(self._owner, save.ticket, pack_tokens(written), pack_hashes(copied.checksums))
        number = next(self._numbers)
        self._ending[number] = len(written)
        return [AskKvbm(number, "commit", COMMIT.encode(commit))]

    def _abort(self, ticket: int) -> AskKvbm:
        number = next(self._numbers)
        self._ending[number] = 0
        return AskKvbm(number, "abort", ABORT.encode(Abort(self._owner, ticket)))

    def settled(self, number: int, reply: Settled | KvbmRefused) -> int:
        """A Commit or Abort was answered. Return how many more blocks the kvbm has now. A refusal has ended the ticket
        as well."""
        committed = self._ending.pop(number, 0)  # 0: an Abort of a Store of an earlier link
        return committed if isinstance(reply, Settled) else 0

    def validate(self) -> None:
        """Raise AssertionError where the stores contradict themselves."""
        held = [slot for save in self._saves.values() for slot in save.device_slots]
        asked = sum(len(asked.blocks) for asked in self._asked.values())
        assert self._under_way == len(held) + asked
        assert self._under_way <= self._most_blocks
        assert len(self._collected) <= BATCH_BLOCKS
        assert len(self._asked) + len(self._saves) + len(self._ending) <= MOST_STORES
        if not self._batch_blocks:
            assert not [*self._collected, *self._asked, *self._ending], "closed, and a request is open"
        pool = [slot for save in self._saves.values() for slot in save.pool_slots]
        assert len(pool) == len(set(pool)), "two copies write to one slot"
