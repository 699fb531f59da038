"""Stores: blocks on their way from the device to the kvbm. Pure.

    collected ──Store──▶ asked ──Granted──▶ saving ──Copied──▶ ending ──Settled──▶ over
        64 blocks,        │                   │                  ▲
        or 20 ms          │ nothing granted   │ nothing good,    │ Commit of what was copied
                          ▼                   ▼ or too late      │
                         over               ending: Abort ───────┘

A block's device slot is held by its copy alone, from Granted to Copied; what was evicted before is not stored. Whoever
is not answered, or whose copies fail, does not ask again: it attaches anew, and that ends every ticket (`LinkLost`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from msgspec import Struct

from services.worker.kv_connector.link import Ask, LinkLost, unpack_slots
from services.worker.mover import Copied, Copy, Mover
from services.worker.scheduler.kv_cache_manager import KVCacheManager
from shared.blocks import Content
from shared.hashing import pack_hashes, pack_tokens
from shared.kvbm_messages import ABORT, COMMIT, STORE, Abort, Commit, Granted, KvbmRefused, Settled, Store, StoreBlock

BATCH_BLOCKS = 64
"""Of one Store: some 10 KB, and a few milliseconds' copies."""
COLLECT_S = 0.02
"""How long the first of a Store's blocks waits for others."""
MOST_STORES = 8
"""Asked, saving or ending at once."""
COPY_SHARE = 0.75
"""Of a ticket's time; no copy begins after it, so that the commit is there in time."""


class _Asked(Struct):
    sent_s: float
    blocks: list[Content]


class _Save(Struct):
    ticket: int
    pool_slots: list[int]
    device_slots: list[int]
    ends_s: float
    """Of the ticket's time, at the earliest."""


class Stores:
    """Between `open` and `close` there is a kvbm to ask; copies may end later."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        mover: Mover,
        batches: Iterator[int],
        ask: Ask,
        most_blocks: int,
        *,
        checks: bool = False,
    ) -> None:
        """`batches` names the mover's; `most_blocks`: of the device that are asked for or held, at once; `checks`:
        checksums are made."""
        self._checks = checks
        assert most_blocks > 0
        self._kv_cache = kv_cache
        self._mover = mover
        self._batches = batches
        self._ask = ask
        self._most_blocks = most_blocks
        self._owner = ""
        self._pool_slots = 0
        self._batch_blocks = 0
        """Of one Store; 0: closed."""
        self._collected: list[Content] = []
        self._send_s = inf
        self._asked: dict[int, _Asked] = {}
        """By number."""
        self._saves: dict[int, _Save] = {}
        """By batch."""
        self._ending: dict[int, int] = {}
        """Commits and Aborts by number, and how many blocks each commits."""
        self._under_way = 0
        """Blocks asked for or held."""

    def open(self, owner: str, pool_slots: int, blocks_per_request: int) -> None:
        """The kvbm has taken up this owner, and gives it slots below `pool_slots`."""
        assert self.quiet
        assert not self._asked
        assert not self._ending
        self._owner = owner
        self._pool_slots = pool_slots
        self._batch_blocks = min(BATCH_BLOCKS, blocks_per_request, self._most_blocks)

    def close(self) -> list[int]:
        """There is nobody to ask any more; returns the numbers of the Stores whose answers were awaited."""
        self._batch_blocks = 0
        self._collected = []
        self._send_s = inf
        awaited = list(self._asked)
        self._under_way -= sum(len(asked.blocks) for asked in self._asked.values())
        self._asked.clear()
        self._ending.clear()
        for batch in self._saves:
            self._mover.cancel(batch)
        return awaited

    @property
    def quiet(self) -> bool:
        """Whether no copy is under way."""
        return not self._saves

    @property
    def wait_until_s(self) -> float | None:
        """When `turn` will have something to do by itself."""
        return self._send_s if self._collected and not self._full else None

    @property
    def _full(self) -> bool:
        return len(self._asked) + len(self._saves) + len(self._ending) >= MOST_STORES

    def turn(self, now_s: float) -> None:
        """Takes what is offered, and asks for slots where there is enough of it. Called after each step: it takes some
        0.5 µs while nothing is offered."""
        if self._full:
            return
        most = self._batch_blocks
        if not self._collected:
            if self._under_way + most > self._most_blocks:
                return
            self._send_s = now_s + COLLECT_S
        if len(self._collected) < most:
            self._collected += self._kv_cache.offers(most - len(self._collected))
        if self._collected and (len(self._collected) >= most or now_s >= self._send_s):
            self._send(now_s)

    def _send(self, now_s: float) -> None:
        blocks, self._collected = self._collected, []
        body = [StoreBlock(block.key, block.parent, block.tokens, block.lora, block.salt) for block in blocks]
        self._asked[self._ask("store", STORE.encode(Store(self._owner, body)))] = _Asked(now_s, blocks)
        self._under_way += len(blocks)

    def granted(self, number: int, reply: Granted | KvbmRefused) -> None:
        """The answer to a Store. Raises LinkLost."""
        asked = self._asked.pop(number)
        self._under_way -= len(asked.blocks)
        if isinstance(reply, KvbmRefused) or not reply.ticket:
            return
        granted, pool_slots = reply.blocks, unpack_slots(reply.slots, self._pool_slots)
        indices = set(granted)
        if not len(granted) == len(indices) == len(pool_slots) or not indices <= set(range(len(asked.blocks))):
            raise LinkLost(f"{len(pool_slots)} slots were granted for {granted} of {len(asked.blocks)} blocks")
        held = self._kv_cache.pin([asked.blocks[index].key for index in granted])
        pairs = [(pool, device) for pool, device in zip(pool_slots, held, strict=True) if device is not None]
        if not pairs:
            self._abort(reply.ticket)
            return
        save = _Save(
            ticket=reply.ticket,
            pool_slots=[pool for pool, _ in pairs],
            device_slots=[device for _, device in pairs],
            ends_s=asked.sent_s + reply.time_left_s,
        )
        batch = next(self._batches)
        self._saves[batch] = save
        self._under_way += len(pairs)
        copies = [Copy(pool, device, checksum=0 if self._checks else None) for pool, device in pairs]
        self._mover.save(batch, copies, asked.sent_s + COPY_SHARE * reply.time_left_s)

    def owns(self, batch: int) -> bool:
        """Whether the mover's batch is one of these."""
        return batch in self._saves

    def ended(self, copied: Copied, now_s: float) -> None:
        """A batch has ended."""
        save = self._saves.pop(copied.batch)
        self._kv_cache.unpin(save.device_slots)
        self._under_way -= len(save.device_slots)
        if copied.failed or not self._batch_blocks:
            return  # its ticket ends with the next attach: a GPU that is lost may still write, and its slots be others'
        written = [slot for slot, good in zip(save.pool_slots, copied.good, strict=True) if good]
        if not written or now_s >= save.ends_s:
            self._abort(save.ticket)
            return
        commit = Commit(self._owner, save.ticket, pack_tokens(written), pack_hashes(copied.checksums))
        self._ending[self._ask("commit", COMMIT.encode(commit))] = len(written)

    def _abort(self, ticket: int) -> None:
        self._ending[self._ask("abort", ABORT.encode(Abort(self._owner, ticket)))] = 0

    def settled(self, number: int, reply: Settled | KvbmRefused) -> int:
        """The answer to a Commit or Abort; how many blocks the kvbm has now. A refusal has ended the ticket as well."""
        committed = self._ending.pop(number, 0)  # 0: an Abort for a Store from before
        return committed if isinstance(reply, Settled) else 0

    def validate(self) -> None:
        """Raises AssertionError where the stores contradict themselves."""
        held = [slot for save in self._saves.values() for slot in save.device_slots]
        asked = sum(len(asked.blocks) for asked in self._asked.values())
        assert self._under_way == len(held) + asked
        assert self._under_way <= self._most_blocks
        assert len(self._collected) <= BATCH_BLOCKS
        assert len(self._asked) + len(self._saves) + len(self._ending) <= MOST_STORES
        if not self._batch_blocks:
            assert not [*self._collected, *self._asked, *self._ending], "closed, and something is asked"
        pool = [slot for save in self._saves.values() for slot in save.pool_slots]
        assert len(pool) == len(set(pool)), "two copies write to one slot"
