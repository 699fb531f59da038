"""Stores: blocks on their way from the device to the kvbm. Pure.

    collected ──Store──▶ asked ──Granted──▶ saving ──Copied──▶ ending ──Settled──▶ over
        64 blocks,        │                   │                  ▲
        or 20 ms          │ nothing granted   │ nothing good,    │ Commit of what was copied
                          ▼                   ▼ or too late      │
                         over               ending: Abort ───────┘

A block's device slot is held by its copy alone, from Granted to Copied; a block that was evicted before is not stored.
Blocks whose copies or whose Commit came too late are asked for again, some times: a machine without a free core delays
engine and kvbm by seconds. If blocks came too late every time, copies are too slow for the kvbm, and none is asked for
again until some were stored in time. Where an answer does not come, or copies fail, nothing is asked again: the engine
attaches again, which ends every ticket (`LinkLost`), and the new link is offered the blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import compress
from math import inf
from operator import not_

from msgspec import Struct

from services.worker.contracts.device_blocks import DeviceBlocks
from services.worker.contracts.mover import Copied, Copy
from services.worker.kv_connector.actions import Action, CancelBatch, LinkLost, SaveBatch, unpack_slots
from services.worker.kv_connector.contract import KvbmAsk
from shared.blocks import Content
from shared.hashing import pack_hashes, pack_tokens
from shared.messages.kvbm import ABORT, COMMIT, STORE, Abort, Commit, Granted, KvbmRefused, Settled, Store, StoreBlock
from shared.pool.socket_frames import MOST_FRAME_BYTES

BATCH_BLOCKS = 64
"""Most blocks of one Store: some 10 KB, and a few milliseconds' copies."""
BATCH_BYTES = MOST_FRAME_BYTES // 2
"""Most bytes of one Store's blocks. A frame that is too large would cost the link."""
_BLOCK_BYTES = 64
"""Most bytes of a block in a Store, without its tokens, LoRA, salt and images."""
COLLECT_S = 0.02
"""Seconds that the first of a Store's blocks waits for others, as a rule."""
MOST_STORES = 8
"""Most Stores that are asked, saving or ending at once."""
MOST_TRIES = 3
"""Most Stores that one block is in, if each comes too late."""
COPY_SHARE = 0.75
"""Share of a ticket's time after which no copy begins, so that the Commit arrives in time."""


class _AskedStore(Struct):
    sent_s: float
    blocks: list[Content]
    tries: int
    """Which try it is, from 1 on."""


class _Retry(Struct):
    """Blocks that came too late."""

    blocks: list[Content]
    tries: int
    """The number of Stores that they were in."""


class _Ending(Struct):
    committed: list[Content]
    """The blocks of a Commit. None if it is an Abort."""
    tries: int


class _Save(Struct):
    ticket: int
    blocks: list[Content]
    tries: int
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
        """Most blocks of one Store. 0 if closed."""
        self._collected: list[Content] = []
        self._send_s = inf
        self._asked: dict[int, _AskedStore] = {}
        """Number of a request → the Store that awaits its answer."""
        self._saves: dict[int, _Save] = {}
        """Batch of the mover → the save that it copies."""
        self._ending: dict[int, _Ending] = {}
        """Number of a Commit or Abort → what it commits."""
        self._retries: deque[_Retry] = deque()
        """What is asked for again. It was under way: no more than may be."""
        self._too_slow = False
        """Whether blocks came too late in MOST_TRIES Stores, and none were stored since."""
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
        self._too_slow = False

    def close(self) -> list[Action]:
        """There is no kvbm to ask any longer: no request is open after this."""
        self._batch_blocks = 0
        self._collected = []
        self._send_s = inf
        self._under_way -= sum(len(asked.blocks) for asked in self._asked.values())
        self._asked.clear()
        self._ending.clear()
        self._retries.clear()
        return [CancelBatch(batch) for batch in self._saves]

    @property
    def idle(self) -> bool:
        """Whether no copy is under way."""
        return not self._saves

    @property
    def collecting(self) -> bool:
        """Whether blocks wait to be asked for."""
        return bool(self._collected or self._retries)

    @property
    def wait_until_s(self) -> float | None:
        """When `step` will have something to do without any event."""
        return self._send_s if self._collected and not self._full else None

    @property
    def _full(self) -> bool:
        return len(self._asked) + len(self._saves) + len(self._ending) >= MOST_STORES

    @property
    def _has_room(self) -> bool:
        return self._under_way + self._batch_blocks <= self._most_blocks

    def step(self, now_s: float) -> list[Action]:
        """Collect offered blocks, and ask for slots if there are enough blocks; before them for those that came too
        late. Called after each step: it takes some 0.5 µs while nothing is offered."""
        actions: list[Action] = []
        while self._retries and not self._collected and self._has_room and not self._full:
            retry = self._retries.popleft()
            actions.append(self._send(now_s, retry.blocks, retry.tries + 1))
        if self._full or (not self._collected and not self._has_room):
            return actions
        most = min(self._batch_blocks, self._most_blocks - self._under_way)
        if not self._collected:
            self._send_s = now_s + self._collect_s
        if len(self._collected) < most:
            self._collected += self._blocks.offers(most - len(self._collected))
        if self._collected and (len(self._collected) >= most or now_s >= self._send_s):
            while self._collected and not self._full:
                count = _fitting(self._collected)
                blocks, self._collected = self._collected[:count], self._collected[count:]
                if blocks:
                    actions.append(self._send(now_s, blocks, 1))
                else:
                    self._blocks.declined([self._collected.pop(0).key])  # no Store can have it
        return actions

    def _send(self, now_s: float, blocks: list[Content], tries: int) -> KvbmAsk:
        body = [StoreBlock(one.key, one.parent, one.tokens, one.lora, one.salt, one.extra) for one in blocks]
        number = next(self._numbers)
        self._asked[number] = _AskedStore(now_s, blocks, tries)
        self._under_way += len(blocks)
        return KvbmAsk(number, "store", STORE.encode(Store(self._owner, body)))

    def granted(self, number: int, reply: Granted | KvbmRefused) -> list[Action]:
        """A Store was answered. Raise LinkLost if the answer does not fit it."""
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
        blocks = [asked.blocks[index] for index in granted]
        pinned = self._blocks.pin([block.key for block in blocks])
        pinned_blocks = [
            (block, pool, device)
            for block, pool, device in zip(blocks, pool_slots, pinned, strict=True)
            if device is not None
        ]
        if not pinned_blocks:
            return [self._abort(reply.ticket)]
        save = _Save(
            ticket=reply.ticket,
            blocks=[block for block, _, _ in pinned_blocks],
            tries=asked.tries,
            pool_slots=[pool for _, pool, _ in pinned_blocks],
            device_slots=[device for _, _, device in pinned_blocks],
            ends_s=asked.sent_s + reply.time_left_s,
        )
        batch = next(self._batches)
        self._saves[batch] = save
        self._under_way += len(save.blocks)
        copies = [Copy(pool, device, checksum=0 if self._checksums else None) for _, pool, device in pinned_blocks]
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
        in_time = copied.good if now_s < save.ends_s else [False] * len(copied.good)
        self._ask_again(list(compress(save.blocks, map(not_, in_time))), save.tries)
        written = list(compress(save.pool_slots, in_time))
        if not written:
            return [self._abort(save.ticket)]
        commit = Commit(self._owner, save.ticket, pack_tokens(written), pack_hashes(copied.checksums))
        number = next(self._numbers)
        self._ending[number] = _Ending(list(compress(save.blocks, in_time)), save.tries)
        return [KvbmAsk(number, "commit", COMMIT.encode(commit))]

    def _ask_again(self, blocks: list[Content], tries: int) -> None:
        """Ask for blocks again that came too late, unless they or others did so too often."""
        if not blocks:
            return
        if tries >= MOST_TRIES:
            self._too_slow = True
        if not self._too_slow:
            self._retries.append(_Retry(blocks, tries))
            self._blocks.asked_again([block.key for block in blocks])

    def _abort(self, ticket: int) -> KvbmAsk:
        number = next(self._numbers)
        self._ending[number] = _Ending([], 0)
        return KvbmAsk(number, "abort", ABORT.encode(Abort(self._owner, ticket)))

    def settled(self, number: int, reply: Settled | KvbmRefused) -> int:
        """A Commit or Abort was answered. Return how many more blocks the kvbm has now. A refusal has ended the ticket
        as well."""
        ending = self._ending.pop(number, None)
        if ending is None:
            return 0  # an Abort of a Store of an earlier link
        if isinstance(reply, Settled):
            if ending.committed:
                self._too_slow = False
            return len(ending.committed)
        self._ask_again(ending.committed, ending.tries)
        return 0

    def validate(self) -> None:
        """Raise AssertionError if the stores contradict themselves."""
        held = [slot for save in self._saves.values() for slot in save.device_slots]
        asked = sum(len(asked.blocks) for asked in self._asked.values())
        assert self._under_way == len(held) + asked
        assert self._under_way <= self._most_blocks
        assert len(self._collected) <= BATCH_BLOCKS
        assert sum(len(retry.blocks) for retry in self._retries) <= (MOST_STORES + 1) * BATCH_BLOCKS
        assert len(self._asked) + len(self._saves) + len(self._ending) <= MOST_STORES
        if not self._batch_blocks:
            assert not [*self._collected, *self._asked, *self._ending, *self._retries], "closed, and a request is open"
        pool = [slot for save in self._saves.values() for slot in save.pool_slots]
        assert len(pool) == len(set(pool)), "two copies write to one slot"


def _fitting(blocks: Sequence[Content]) -> int:
    """Return how many of the blocks, from the first on, one Store can have."""
    left_bytes = BATCH_BYTES
    for count, block in enumerate(blocks):
        named = len(block.lora.encode()) + len(block.salt.encode()) + len(block.extra)
        left_bytes -= _BLOCK_BYTES + len(block.tokens) + named
        if left_bytes < 0:
            return count
    return len(blocks)
