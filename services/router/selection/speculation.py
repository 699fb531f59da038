"""Blocks that routed prompts should leave where they were sent, until events confirm them or they expire. Pure.

    sent to A:       s0 s1 │ s2 s3 s4       A is known to hold s0 s1; the run s2 s3 s4 is expected there
    next request:    s0 s1   s2 s3 x4       found at A: 2 by the index and 2 by the run that begins with s2

A burst of similar requests comes faster than events do. Without speculation, each would find the cache empty, and they
would be spread. A prompt that waits for others at its worker is not computed for long, so its run does not expire
before that: in a busy fleet, the questions about a document would else follow it to other workers, which all compute
it. For candidates that send no events, this is all that the router knows; it is kept for longer there, and renewed by
use.

The index is not changed. A sequence hash names its whole prefix, so the first hash of a run is enough to find it. The
run extends every overlap that reaches its beginning, and a binary search finds how far it agrees with a prompt: a run
costs the same however long it is. Events confirm a run when the index finds as many blocks without it. A run belongs to
the candidate's slot: when the slot is retired, its runs are ignored.

Expected blocks are not kept in the index: adding and removing them there took a third of a choice's time, and the index
could not say whether a block came from an event or from a guess.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from services.router.index.index import CandidateId, Slot
from services.router.selection.load import AttemptId
from shared.messages.select import Overlap

RUN_BYTES = 600
"""Most bytes of one run without its hashes, as measured: an object, its key, and its entries in two tables in which
keys come and go."""
RENEW_S = 0.5
"""Seconds before a run expires, from which on it is kept if its prompt still waits."""
MOST_ATTEMPTS = 8
"""The latest attempts that are remembered of a run; any of them may compute it."""
_HASH_BYTES = 8
_NOTHING = Overlap()


class ExpectedRun:
    """Blocks expected in a slot, as packed sequence hashes."""

    __slots__ = ("attempts", "expires_s", "first", "packed", "slot")

    def __init__(self, slot: Slot, packed: bytes, expires_s: float, attempt: AttemptId | None) -> None:
        self.slot = slot
        self.attempts: tuple[AttemptId, ...] = () if attempt is None else (attempt,)
        """The latest attempts that were sent there with it. If one is cancelled, the next computes it."""
        self.packed = packed
        self.first = int.from_bytes(packed[:_HASH_BYTES], "little")
        self.expires_s = expires_s

    @property
    def size_bytes(self) -> int:
        return RUN_BYTES + len(self.packed)


class Speculation:
    """The runs that have not expired; at the limit the oldest are dropped early."""

    def __init__(self, *, ttl_s: float, limit_bytes: int) -> None:
        self._ttl_s = ttl_s
        self._limit_bytes = limit_bytes
        self._runs: OrderedDict[tuple[int, Slot], ExpectedRun] = OrderedDict()
        """Runs by first hash and slot, soonest to expire first. (A plain dict is slow to find its first entry after
        many were deleted.)"""
        self._starts: dict[int, list[ExpectedRun]] = {}
        """Runs by first hash."""
        self.bytes = 0

    def add(self, slot: Slot, packed: bytes, now_s: float, attempt: AttemptId | None = None) -> None:
        """Expect blocks in the slot, after those that it holds or is already expected to hold. `attempt` computes
        them."""
        if self._ttl_s <= 0 or not packed or RUN_BYTES + len(packed) > self._limit_bytes:
            return
        run = ExpectedRun(slot, packed, now_s + self._ttl_s, attempt)
        known = self._runs.get((run.first, slot))
        if known is not None:
            if known.expires_s > now_s and len(known.packed) >= len(packed):
                if attempt is not None:
                    self.follow((known,), attempt)
                return  # the same prompt again; its last block is never looked up
            run.attempts = (*known.attempts, *run.attempts)[-MOST_ATTEMPTS:]
            self._drop(known)
        while self.bytes + run.size_bytes > self._limit_bytes:
            self._drop(next(iter(self._runs.values())))
        self._runs[run.first, slot] = run
        self._starts.setdefault(run.first, []).append(run)
        self.bytes += run.size_bytes

    def follow(self, runs: Sequence[ExpectedRun], attempt: AttemptId) -> None:
        """An attempt was sent where these runs are expected: it computes them if those before it do not."""
        for run in runs:
            if attempt not in run.attempts:
                run.attempts = (*run.attempts, attempt)[-MOST_ATTEMPTS:]

    def extend_overlaps(
        self, found: dict[CandidateId, Overlap], hashes: Sequence[int], packed: bytes, now_s: float
    ) -> list[ExpectedRun]:
        """Add expected blocks to the overlaps `found`; return the runs that extended one, in the prompt's order.

        `packed` begins with `hashes`. Cost: one lookup per block, up to the end of the longest overlap.
        """
        followed: list[ExpectedRun] = []
        starts = self._starts
        reach = max([overlap.blocks for overlap in found.values()], default=0)
        looked = 0
        while starts and looked <= reach and looked < len(hashes):
            ahead = hashes[looked : reach + 1]
            for first in filter(starts.__contains__, ahead):
                position = hashes.index(first, looked)
                for run in starts[first]:
                    end = _extend_overlap(run, position, found, packed, len(hashes), now_s)
                    if end:
                        followed.append(run)
                        reach = max(reach, end)
            looked += len(ahead)
        return followed

    def renew(self, runs: Sequence[ExpectedRun], now_s: float) -> None:
        """Renew runs that were of use. The last one is renewed first: at the limit a chain's end must be dropped before
        its beginning."""
        for run in reversed(runs):
            run.expires_s = now_s + self._ttl_s
            self._runs.move_to_end((run.first, run.slot))

    def expire(self, now_s: float, *, runs: int, waits: Callable[[AttemptId], bool] = lambda _attempt: False) -> None:
        """Look at up to `runs` runs: drop expired ones, and keep those whose prompts wait to be computed, as `waits`
        says."""
        for run in list(islice(self._runs.values(), runs)):
            if run.expires_s > now_s + RENEW_S:
                return
            if any(map(waits, run.attempts)):
                self.renew((run,), now_s)
            elif run.expires_s <= now_s:
                self._drop(run)

    def _drop(self, run: ExpectedRun) -> None:
        del self._runs[run.first, run.slot]
        here = self._starts[run.first]
        here.remove(run)
        if not here:
            del self._starts[run.first]
        self.bytes -= run.size_bytes

    def validate(self) -> None:
        """Assert every invariant."""
        runs = list(self._runs.values())
        assert self.bytes == sum(run.size_bytes for run in runs)
        assert not runs or self.bytes <= self._limit_bytes
        times = [run.expires_s for run in runs]
        assert times == sorted(times)
        assert sum(len(here) for here in self._starts.values()) == len(runs)
        assert all(here for here in self._starts.values())
        for run in runs:
            assert self._runs[run.first, run.slot] is run
            assert run in self._starts[run.first]


def _extend_overlap(
    run: ExpectedRun, position: int, found: dict[CandidateId, Overlap], packed: bytes, blocks: int, now_s: float
) -> int:
    """Extend the overlap of the run's candidate by the run, which begins at `position`. Return where the overlap ends
    then, or 0 if nothing is added. `packed` begins with the `blocks` requested."""
    candidate = run.slot.candidate
    known = found.get(candidate, _NOTHING)
    low = known.blocks
    high = min(position + len(run.packed) // _HASH_BYTES, blocks)
    if not position <= low < high or run.expires_s <= now_s or run.slot.state != "open":
        return 0

    def agree(block: int) -> bool:
        """Return whether run and prompt agree at this block; then they agree on all blocks before it, because a
        sequence hash names its whole prefix."""
        at, there = _HASH_BYTES * (block - position), _HASH_BYTES * block
        return run.packed[at : at + _HASH_BYTES] == packed[there : there + _HASH_BYTES]

    if not agree(low):
        return 0
    low += 1
    while low < high:
        middle = (low + high) // 2
        if agree(middle):
            low = middle + 1
        else:
            high = middle
    found[candidate] = Overlap(known.device + low - known.blocks, known.host, known.disk)
    return low
