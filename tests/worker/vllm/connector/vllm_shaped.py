"""An engine with vLLM's rules, without vLLM: its block pool, its scheduler's order of calls, its asynchronous loads,
and ranks with real bytes. The connector's halves are the real ones.

A token's KV names the whole prefix before it, so any byte that is not of exactly this prefix fails the test. The rules
are those of vLLM 0.32's `v1/core/sched/scheduler.py` and `v1/core/block_pool.py`:

    waiting ──allocated──▶ running ──▶ finished         a request that loads waits with its blocks, until every rank has
       │  ▲                  │ preempted: blocks freed    said that its load has ended; then its good blocks are cached,
       │  └──────────────────┘                            and it computes the others
       └─ find > 0 ─▶ waiting for remote ─▶ waiting       an aborted one keeps its blocks until then
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import shake_128
from pathlib import Path
from random import Random
from typing import cast

from services.worker.kv_connector.pool_attachment import MappedPool, OwnerName
from services.worker.transfer.host_copier import HostCopier
from services.worker.transfer.mover import TransferMover
from services.worker.vllm.connector.chain import TokenChain
from services.worker.vllm.connector.kv_layout import TensorPlace, block_shape
from services.worker.vllm.connector.orders import RankFacts
from services.worker.vllm.connector.pool import VllmPool
from services.worker.vllm.connector.scheduler_half import Identity, SchedulerHalf
from services.worker.vllm.connector.settings import ConnectorSettings
from services.worker.vllm.connector.worker_half import WorkerHalf
from tests.worker.vllm.connector.step_mover import StepMover

IDLE_STEPS = 2
"""Steps that compute nothing after which none is under way, without a pipeline."""

BLOCK = 2
"""Tokens of a block."""
LAYERS = 2
TOKEN_BYTES = 64
"""Bytes of one token's keys, or values, in one layer of one rank."""
FRAGMENT_BYTES = BLOCK * TOKEN_BYTES
MODEL = "m"


class Block:
    """vLLM's KVCacheBlock."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.is_null = False
        self.block_hash: object | None = None


class Pool:
    """vLLM's BlockPool: freed blocks stay cached until they are allocated again; a content may be there twice."""

    def __init__(self, blocks: int) -> None:
        self.blocks: Sequence[Block] = [Block(each) for each in range(blocks)]
        self._free: OrderedDict[int, Block] = OrderedDict((each.block_id, each) for each in self.blocks)
        self._cached: dict[object, dict[int, Block]] = {}
        null = self._free.pop(0)
        null.is_null = True

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[Block]:
        """Take free blocks; their contents are evicted."""
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            self.uncache(block)
            block.ref_cnt = 1
        return taken

    get_new_blocks = allocate

    def cache_full_blocks(
        self, request: Request, blocks: list[Block], cached: int, full: int, block_size: int, group: int
    ) -> None:
        assert (block_size, group) == (BLOCK, 0)
        for index in range(cached, full):
            assert not blocks[index].is_null
            self.cache(blocks[index], request.block_name(index))

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                del self._free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0, "freed twice"
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._free[block.block_id] = block
                if block.block_hash is None:
                    self._free.move_to_end(block.block_id, last=False)

    def cache(self, block: Block, name: object) -> None:
        if block.block_hash is None:
            block.block_hash = name
            self._cached.setdefault(name, {})[block.block_id] = block

    def uncache(self, block: Block) -> None:
        if block.block_hash is not None:
            same = self._cached[block.block_hash]
            del same[block.block_id]
            if not same:
                del self._cached[block.block_hash]
            block.block_hash = None

    def clear(self) -> None:
        """Forget all contents, as vLLM does while no block is held."""
        assert not self.held
        for block in self.blocks:
            self.uncache(block)

    def find(self, name: object) -> Block | None:
        return next(iter(self._cached.get(name, {}).values()), None)

    @property
    def held(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.ref_cnt]


class Rank:
    """One rank's memory, and its half of the connector."""

    def __init__(
        self, number: int, blocks: int, clock: Callable[[], float], pool: Path, *, verify: bool, threads: bool
    ) -> None:
        """`threads`: it copies as it does in earnest, at any time; else as the test says, through `steps`."""
        self.number = number
        self._blocks = blocks
        size = LAYERS * 2 * blocks * FRAGMENT_BYTES
        self.memory = memoryview(bytearray(size))
        at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        layer_bytes = 2 * blocks * FRAGMENT_BYTES
        places = {
            f"layer {layer}": TensorPlace(
                at + layer * layer_bytes,
                (2, blocks, BLOCK, TOKEN_BYTES),
                (blocks * FRAGMENT_BYTES, FRAGMENT_BYTES, TOKEN_BYTES, 1),
                1,
            )
            for layer in range(LAYERS)
        }
        shape = block_shape(places, blocks, block_axis=1)
        copier = HostCopier(shape, self.memory)
        self.steps = StepMover(copier, clock) if not threads else None
        mover = self.steps or TransferMover(copier, clock, most_blocks=2, verify=verify)
        self.facts = RankFacts(shape.block_bytes, blocks, "tests")
        self.half = WorkerHalf(cast(TransferMover, mover), self.facts, number, OwnerName(pool, ""), MappedPool(pool))

    def write(self, block: int, offset: int, prefix: Sequence[int]) -> None:
        """Compute the last token of `prefix`, at this place of a block."""
        for place, content in self._places(block, offset, prefix):
            self.memory[place : place + TOKEN_BYTES] = content

    def check(self, block: int, offset: int, prefix: Sequence[int]) -> None:
        for place, content in self._places(block, offset, prefix):
            assert bytes(self.memory[place : place + TOKEN_BYTES]) == content, "wrong bytes"

    def _places(self, block: int, offset: int, prefix: Sequence[int]) -> list[tuple[int, bytes]]:
        return [
            (
                (fragment * self._blocks + block) * FRAGMENT_BYTES + offset * TOKEN_BYTES,
                token_bytes(self.number, fragment, prefix),
            )
            for fragment in range(2 * LAYERS)
        ]


def token_bytes(rank: int, fragment: int, prefix: Sequence[int]) -> bytes:
    """Return the right bytes of the last token of `prefix`, in one fragment of a rank's memory."""
    return shake_128(repr((rank, fragment, list(prefix))).encode()).digest(TOKEN_BYTES)


class Request:
    """vLLM's Request, as far as the connector looks at it."""

    def __init__(self, name: str, prompt: Sequence[int], most: int, salt: str) -> None:
        self.name = name
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.most = len(prompt) + most
        self.salt = salt
        self.computed = 0
        self.in_flight = 0
        self.stale = 0
        """Tokens in flight whose results do not count, since the request was preempted."""
        self.blocks: list[Block] = []
        self.state = "waiting"
        """waiting, remote, running or finished"""
        self.load_failed = False
        self.received = False
        self.loaded_blocks = 0
        self.request_id = name
        self.expected = False
        """Whether another engine computes it, and its blocks are only loaded."""
        self.hands_over = ""
        """Name under which another engine goes on with it. Empty if none does."""

    def block_name(self, index: int) -> object:
        return self.salt, tuple(self.tokens[: (index + 1) * BLOCK])


class _Work:
    """A request's tokens of one step, as the ranks see them."""

    def __init__(self, request: Request, first: int, tokens: int, drafts: list[int]) -> None:
        """The last of the `tokens` tokens are the drafts, which may turn out to be wrong."""
        self.request = request
        self.drafts = drafts
        self.first = first
        self.tokens = tokens
        self.blocks = [block.block_id for block in request.blocks]
        self.known = [*map(ord, request.salt), *request.tokens, *drafts]
        self.skip = len(request.salt)


class _Step:
    def __init__(self) -> None:
        self.work: list[_Work] = []
        self.freed: list[list[Block]] = []
        """Blocks that may be reused once this step is processed."""
        self.finished: list[set[str]] = []
        self.invalid: set[int] = set()
        self.reports: list[bytes] = []


class Engine:
    """One engine. `step` is one turn of vLLM's loop; up to `depth` steps are under way at once."""

    def __init__(
        self,
        settings: ConnectorSettings,
        draw: Random,
        clock: Callable[[], float],
        *,
        name: str,
        blocks: int = 24,
        ranks: int = 1,
        depth: int = 1,
        drafts: int = 0,
        threads: bool = True,
    ) -> None:
        """With `drafts`, a step guesses that number of tokens after a request's last one, and computes them. `threads`
        is that of Rank."""
        assert depth == 1 or not drafts
        identity = Identity(MODEL, "w", "uint8", LAYERS, 1, TOKEN_BYTES, BLOCK, blocks, ranks, name)
        self.pool = Pool(blocks)
        self.half = SchedulerHalf(settings, identity, cast(VllmPool, self.pool), clock, idle_steps=IDLE_STEPS)
        directory, verify = Path(settings.pool), settings.verify
        self.ranks = [Rank(each, blocks, clock, directory, verify=verify, threads=threads) for each in range(ranks)]
        self.requests: dict[str, Request] = {}
        """All that hold anything; an aborted one stays until its load has ended."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.asked_again = self.loaded_tokens = self.preempted = self.failed_loads = 0
        self.accepted_drafts = self.rejected_drafts = 0
        self._drafts = drafts
        self._draw = draw
        self._depth = depth
        self._threads = threads
        self._steps: deque[_Step] = deque()
        self._due: dict[str, int] = {}
        """Request → computed tokens from which on its blocks are offered again, as the connector does."""
        self._pending: dict[str, int] = {}
        """Request → ranks that have said that its load has ended."""

    # --- from outside

    def add(self, request: Request) -> None:
        self.requests[request.name] = request
        self.waiting.append(request)
        chain = TokenChain(request.tokens, BLOCK, MODEL, "", request.salt)
        if request.expected:
            self.half.expect(request.name, chain)
        else:
            self.half.track(request.name, chain)

    def abort(self, name: str) -> None:
        request = self.requests.get(name)
        if request is None or request.state == "finished":
            return
        waits = request.state == "remote" and not request.received
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._finish(request, keep_blocks=waits)

    @property
    def has_work(self) -> bool:
        """What keeps vLLM's loop stepping."""
        return bool(self.requests or self._steps) or self.half.unsettled

    def step(self) -> None:
        """Schedule and compute a step; process the oldest one if as many are under way as may be."""
        if self._steps and not (self.requests or self.half.unsettled):
            self._process(self._steps.popleft())
            return
        step = self._schedule()
        self._steps.append(step)
        if len(self._steps) >= self._depth or not step.work:
            self._process(self._steps.popleft())

    def close(self) -> None:
        self.half.close()
        for rank in self.ranks:
            rank.half.close()

    # --- the scheduler

    def _schedule(self) -> _Step:
        step = _Step()
        for request in list(self.running):
            if request in self.running:
                self._schedule_running(request, step)
        holders_first = sorted(self.waiting, key=lambda request: not request.blocks)
        for request in holders_first:
            if len(self.running) >= 6 or not self._schedule_waiting(request, step):
                break
        for work in step.work:
            if work.request.computed - work.request.in_flight >= self._due.get(work.request.name, 0):
                self._offer(work.request)
        self._launch(step, self.half.orders(computes=bool(step.work) or not self._threads))
        for work in step.work:
            work.request.computed += work.tokens
            work.request.in_flight += work.tokens
        return step

    def _schedule_running(self, request: Request, step: _Step) -> None:
        if request.in_flight and request.computed >= len(request.tokens):
            return  # its next token is not known yet
        left = len(request.tokens) - request.computed
        tokens = min(left, self._draw.randint(1, 5))
        drafts = [self._draw.randint(1, 2) for _ in range(self._drafts)] if tokens == left else []
        tokens += len(drafts)
        while (needed := self._blocks_for(request, request.computed + tokens)) > self.pool.get_num_free_blocks():
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return
        self._allocate(request, needed)
        self._plan(request, request.computed, tokens, step, drafts)

    def _schedule_waiting(self, request: Request, step: _Step) -> bool:
        """Return False if there is no room, so that those after it wait as well."""
        if request.stale:
            return True
        if request.state == "remote":
            if not request.received:
                return True
            self._promote(request)
        cached: list[Block] = []
        external = 0
        if not request.computed:
            while (len(cached) + 1) * BLOCK < len(request.tokens):
                block = self.pool.find(request.block_name(len(cached)))
                if block is None:
                    break
                cached.append(block)
            if self.half.find_expected(request, len(request.tokens), len(cached) * BLOCK):
                self.asked_again += 1
                return True
            found = self.half.find(request.name, len(request.tokens), len(cached) * BLOCK)
            if found is None:
                self.asked_again += 1
                return True
            external = found
        computed = request.computed or len(cached) * BLOCK + external
        tokens = 0 if external else min(len(request.tokens) - computed, self._draw.randint(1, 5))
        held = len(request.blocks) or len(cached)
        needed = max(0, -(-(computed + tokens) // BLOCK) - held)
        idle = sum(not block.ref_cnt for block in cached)
        if needed + idle + self._reserved(request) > self.pool.get_num_free_blocks():
            return False
        if not request.computed:
            self.pool.touch(cached)
            request.blocks = list(cached)
        self._allocate(request, needed)
        self._due.pop(request.name, None)
        self.half.place(request.name, [block.block_id for block in request.blocks], external)
        request.computed = computed
        if external:
            request.state, request.received, request.load_failed = "remote", False, False
            request.loaded_blocks = external // BLOCK
            self.loaded_tokens += external
            return True
        self.waiting.remove(request)
        request.state = "running"
        self.running.append(request)
        self._plan(request, computed, tokens, step)
        return True

    def _reserved(self, request: Request) -> int:
        """Blocks that requests which hold some already still need for their prompts."""
        holders = [other for other in self.waiting if other.blocks and other is not request]
        return 0 if request.blocks else sum(self._blocks_for(other, len(other.tokens)) for other in holders)

    def _plan(self, request: Request, first: int, tokens: int, step: _Step, drafts: Sequence[int] = ()) -> None:
        """Have the step compute these tokens. As in vLLM, blocks are cached before they are computed, but none with a
        draft."""
        step.work.append(_Work(request, first, tokens, list(drafts)))
        for index in range((first + tokens - len(drafts)) // BLOCK):  # also those of drafts that were accepted
            self.pool.cache(request.blocks[index], request.block_name(index))

    def _promote(self, request: Request) -> None:
        """Its load has ended: cache what it got."""
        if not request.computed:
            self.pool.free_blocks(reversed(request.blocks))
            request.blocks = []
        for index in range(request.computed // BLOCK):
            self.pool.cache(request.blocks[index], request.block_name(index))
        request.state = "waiting"

    def _blocks_for(self, request: Request, tokens: int) -> int:
        return max(0, -(-tokens // BLOCK) - len(request.blocks))

    def _allocate(self, request: Request, count: int) -> None:
        request.blocks += self.pool.allocate(count)

    def _preempt(self, request: Request, step: _Step) -> None:
        self.preempted += 1
        self.running.remove(request)
        self._free(request)
        request.computed, request.stale, request.in_flight = 0, request.in_flight, 0
        request.state = "waiting"
        self.waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        """Free the blocks once no step that is under way writes to them."""
        blocks, request.blocks = list(reversed(request.blocks)), []
        if request.in_flight or request.stale:
            self._steps[-1].freed.append(blocks)
        else:
            self.pool.free_blocks(blocks)

    def _offer(self, request: Request) -> None:
        computed = min(request.computed - request.in_flight, len(request.tokens))
        self._due[request.name] = self.half.offer_computed(request.name, computed, lambda: request.blocks)

    def _finish(self, request: Request, *, keep_blocks: bool = False) -> None:
        if not request.expected:
            self._offer(request)
            del self._due[request.name]
        if request.hands_over:
            self.half.hand_over(request.name, request.hands_over, len(request.tokens) - 1)
        self.half.forget(request.name)
        request.state = "finished"
        if not keep_blocks:
            self._free(request)
            del self.requests[request.name]

    # --- the ranks

    def _launch(self, step: _Step, orders: bytes) -> None:
        """Begin the step on the ranks; it computes later, before its results are processed."""
        for rank in self.ranks:
            rank.half.take_orders(orders)
            step.finished.append(rank.half.finished_loads())
            step.invalid |= rank.half.take_invalid()
            step.reports.append(rank.half.take_report())

    def _compute(self, step: _Step) -> None:
        for rank in self.ranks:
            for work in step.work:
                for at in range(work.first + work.tokens):
                    block, offset = divmod(at, BLOCK)
                    place = work.blocks[block], offset, work.known[: work.skip + at + 1]
                    rank.check(*place) if at < work.first else rank.write(*place)

    # --- a step's results

    def _process(self, step: _Step) -> None:
        self._compute(step)
        for blocks in step.freed:
            self.pool.free_blocks(blocks)
        for request in self.requests.values():
            if request.state == "remote" and not request.received:
                for index, block in enumerate(request.blocks):
                    if block.block_id in step.invalid and index * BLOCK < request.computed:
                        request.computed, request.load_failed = index * BLOCK, True
                        self.failed_loads += 1
        for work in step.work:
            request, tokens = work.request, work.tokens
            if request.stale:
                request.stale -= min(tokens, request.stale)
                continue
            if request.state == "finished":
                continue
            request.in_flight -= tokens
            if request.computed == len(request.tokens) + len(work.drafts) and not request.in_flight:
                self._sample(request, work.drafts)
        self.half.take_reports([report for report in step.reports if report])
        self._count_finished(step.finished)

    def _sample(self, request: Request, drafts: list[int]) -> None:
        """Append a token, and another one for each draft that is right. As in vLLM, an accepted draft after the
        request's end counts as computed."""
        sampled = [self._draw.randint(1, 2)]
        for draft in drafts:
            if sampled[-1] != draft:
                break
            sampled.append(self._draw.randint(1, 2))
        accepted = len(sampled) - 1
        self.accepted_drafts += accepted
        self.rejected_drafts += len(drafts) - accepted
        request.computed -= len(drafts) - accepted
        request.tokens += sampled[: request.most - len(request.tokens)]
        if len(request.tokens) >= request.most:
            self.running.remove(request)
            self._finish(request)

    def _count_finished(self, finished: list[set[str]]) -> None:
        """All ranks must say so, as vLLM's KVOutputAggregator counts."""
        for names in finished:
            for name in names:
                self._pending[name] = self._pending.get(name, 0) + 1
                if self._pending[name] == len(self.ranks):
                    del self._pending[name]
                    request = self.requests[name]  # vLLM ends where it does not know the request
                    assert not request.received, "said twice"
                    if request.state == "remote":
                        request.received = True
                    else:
                        assert request.state == "finished"
                        self._free(request)
                        del self.requests[name]
