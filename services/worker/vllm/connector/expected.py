"""ExpectedPrompts: prompts that another engine computes, whose blocks come to vLLM's cache before their requests. Pure.

    expect ──▶ a fetch that waits for blocks which are not stored yet
                 │ begin_load: blocks of vLLM's pool, as more are stored
                 ▼ end_loads: cached in vLLM's pool, and freed, so that the request finds them, or they are evicted
               end_fetch; forget: the request itself has come, or will not

vLLM has no call that loads blocks without a request, and it would compute what a request's load lacks. So the worker
adds a request of its own for each expected prompt, which vLLM keeps waiting ("ask again") until the worker aborts it;
from it vLLM's pool takes the hashes of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from services.worker.contracts.device_blocks import FetchRequest
from services.worker.vllm.connector.chain import TokenChain
from services.worker.vllm.connector.pool import PoolBlock, VllmPool
from shared.hashing import ContentKey

HELD_SHARE = 1 / 4
"""Share of the device's blocks that loads for expected prompts hold at most."""
GROUP = 0
"""vLLM's number of the only group of KV that the connector takes."""


class HashedRequest(Protocol):
    """The part of vLLM's Request that its pool caches blocks by."""

    request_id: str


class _Expected(Struct, eq=False):
    number: int
    request: HashedRequest
    first: int
    """Index of the first block that the device had not."""
    keys: list[ContentKey]
    blocks: list[PoolBlock] = []
    """What was allocated for blocks first, first + 1 and so on."""
    good: list[bool | None] = []
    """Whether each of them got good bytes. None while it is loading."""
    cached: int = 0
    """How many of them, from the first on, are in vLLM's cache, and no longer held."""
    abandoned: bool = False


class ExpectedPrompts:
    """The expected prompts of one engine."""

    def __init__(self, pool: VllmPool, block_size: int, reserve: int) -> None:
        """`reserve` blocks stay free for requests."""
        self._pool = pool
        self._block_size = block_size
        self._reserve = reserve
        self._by_number: dict[int, _Expected] = {}
        """Fetch → its prompt, until the fetch has ended."""
        self._by_request: dict[str, _Expected | TokenChain] = {}
        """Request of vLLM's → its tokens, until its blocks are asked for; then the fetch, which may have ended."""
        self._new: list[FetchRequest] = []
        self._forgotten: list[int] = []
        self.loaded = 0
        """Blocks loaded since the start."""

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def expect(self, request: str, chain: TokenChain) -> None:
        """A request has come that stands for an expected prompt."""
        self._by_request[request] = chain

    def is_expected(self, request: str) -> bool:
        return request in self._by_request

    def find(self, numbers: Iterator[int], request: HashedRequest, tokens: int, computed: int) -> None:
        """Ask once for the full blocks among the request's `tokens` tokens after the `computed` ones that the device
        has."""
        chain, first = self._by_request[request.request_id], computed // self._block_size
        if isinstance(chain, TokenChain) and (keys := chain.keys(tokens // self._block_size)[first:]):
            number = next(numbers)
            self._by_request[request.request_id] = self._by_number[number] = _Expected(number, request, first, keys)
            self._new.append(FetchRequest(number, keys, awaits=True))

    def forget(self, request: str) -> None:
        """The request has ended."""
        entry = self._by_request.pop(request, None)
        if isinstance(entry, _Expected):
            entry.abandoned = True
            self._forgotten.append(entry.number)

    def changes(self) -> tuple[list[FetchRequest], list[int]]:
        """Return the fetches to begin since the last call, and the numbers of those that were forgotten."""
        new, self._new = self._new, []
        forgotten, self._forgotten = self._forgotten, []
        return new, [number for number in forgotten if number in self._by_number]

    def begin_load(self, number: int, first: int, count: int) -> list[int]:
        """Return device blocks for as many of these blocks as there is room for."""
        entry = self._by_number[number]
        if entry.abandoned or first != len(entry.blocks):
            return []
        held = sum(len(each.blocks) - each.cached for each in self._by_number.values())
        room = min(self._pool.get_num_free_blocks() - self._reserve, int(HELD_SHARE * len(self._pool.blocks)) - held)
        blocks = self._pool.get_new_blocks(max(0, min(count, room)))
        entry.blocks += blocks
        entry.good += [None] * len(blocks)
        return [block.block_id for block in blocks]

    def end_loads(self, number: int, first: int, good: Sequence[bool]) -> None:
        """Cache the blocks up to the first that has no good bytes, or is loading."""
        entry = self._by_number[number]
        entry.good[first : first + len(good)] = good
        before = entry.cached
        while entry.cached < len(entry.good) and entry.good[entry.cached]:
            entry.cached += 1
        if entry.cached > before:
            new = entry.blocks[before : entry.cached]
            at = entry.first + before
            null = self._pool.blocks[0]  # stands for blocks that are cached already
            blocks = [null] * at + new
            self._pool.cache_full_blocks(entry.request, blocks, at, len(blocks), self._block_size, GROUP)
            self._pool.free_blocks(reversed(new))
            self.loaded += len(new)

    def end_fetch(self, number: int) -> None:
        """Nothing more comes: free what could not be used."""
        entry = self._by_number.pop(number)
        assert None not in entry.good, "a load has not ended"
        self._pool.free_blocks(reversed(entry.blocks[entry.cached :]))

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        for number, entry in self._by_number.items():
            assert number == entry.number
            assert entry.cached <= len(entry.blocks) == len(entry.good) <= len(entry.keys)
