"""The cluster-wide cache: for a Fetch that this machine cannot serve whole, other machines' kvbms are asked.

    Fetch ──▶ is it worth it? ──no──▶ answered at once, as without peers
                │ yes
                ▼
              Count: a few peers at once ──▶ a read from the one of which most blocks come in time
                └── no answer, no blocks, a fault, or `wait_s` is over ──▶ the Fetch is answered with what is here

A Fetch waits for `wait_s` at most, and for less if its engine would give kvbm up before that. A read that takes longer
goes on, and the next Fetch finds its blocks. At most as many Fetches wait as there may be reads at once; any further
one is answered at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from msgspec import Struct

from services.kvbm.config import PeersConfig
from services.kvbm.layout.layout import LayoutStore
from services.kvbm.metrics import StoreMetrics
from services.kvbm.peers.choice import PeerChoice
from services.kvbm.peers.imports import PeerImports
from services.kvbm.peers.messages import PeerAddress, PeerFault
from shared.hashing import ContentKey

ASKED_MOST = 4
"""The most peers that are asked for one Fetch."""
ASK_SHARE = 0.5
"""The share of a Fetch's wait that the answers to Count may take."""
REPLY_SHARE = 0.75
"""The share of an engine's own bound for a reply that a Fetch may wait for peers."""


class Bringing(Struct, frozen=True):
    """What is under way for a Fetch that waits for peers."""

    task: asyncio.Task[str]
    wait_s: float
    """Seconds that the Fetch waits for it at most."""


class PeerCache:
    """The Fetches of one kvbm that wait for peers."""

    def __init__(self, imports: PeerImports, config: PeersConfig, metrics: StoreMetrics) -> None:
        self.choice = PeerChoice(config.least_blocks, ASKED_MOST)
        self._tasks: set[asyncio.Task[str]] = set()
        self._imports = imports
        self._config = config
        self._metrics = metrics
        self._now = asyncio.get_running_loop().time

    @property
    def under_way(self) -> int:
        """The number of Fetches for which peers are asked or read."""
        return len(self._tasks)

    def is_worth_asking(self, layout: LayoutStore, missing: int) -> bool:
        """Return whether a Fetch that misses `missing` blocks may wait for peers."""
        if self._config.wait_s <= 0 or missing < self._config.least_blocks or not self.choice.known:
            return False
        if not self.choice.candidates(layout.digest, self._now()):
            return False
        if self._imports.full or self.under_way >= self._config.reads:
            self._metrics.peer_fetches.labels("full").inc()
            return False
        return True

    def rates(self, layouts: Collection[str]) -> dict[str, float]:
        """Return the bytes a second of the fastest peers with these layouts."""
        return self.choice.rates(layouts, self._now()) if self._config.wait_s > 0 else {}

    def bring(self, layout: LayoutStore, keys: Sequence[ContentKey], reply_s: float) -> Bringing:
        """Begin to bring leading blocks of these keys, which are not here, from another machine. It counts as
        under way from now on: several Fetches may come in one turn of the loop. The engine waits `reply_s` for each
        reply. 0 if it does not say."""
        wait_s = min(self._config.wait_s, REPLY_SHARE * reply_s) if reply_s else self._config.wait_s
        task = asyncio.create_task(self._bring(layout, keys, wait_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Bringing(task, wait_s)

    async def wait_brought(self, bringing: Bringing) -> None:
        """Return when what `bring` has begun is done, or its time is over; it goes on then."""
        task = bringing.task
        await asyncio.wait([task], timeout=bringing.wait_s)
        self._metrics.peer_fetches.labels(task.result() if task.done() and not task.cancelled() else "late").inc()

    async def close(self) -> None:
        """End what is under way."""
        while self._tasks:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.wait(self._tasks)

    async def _bring(self, layout: LayoutStore, keys: Sequence[ContentKey], wait_s: float) -> str:
        began_s = self._now()
        candidates = self.choice.candidates(layout.digest, began_s)
        self.choice.note_asked(candidates, began_s)
        counts = await asyncio.gather(*(self._ask(peer, layout, keys, ASK_SHARE * wait_s) for peer in candidates))
        if not any(counts):
            return "nothing"
        now_s, block_bytes = self._now(), layout.layout.kv.block_bytes
        left_s = began_s + wait_s - now_s
        worth = [
            self.choice.worth(peer.instance, blocks, block_bytes, left_s, now_s)
            for peer, blocks in zip(candidates, counts, strict=True)
        ]
        wanted = max(worth)
        if not wanted:
            self._warn_of_slow(layout, candidates, counts, left_s)
            return "not worth it"
        if self._imports.full:
            return "full"
        peer = candidates[worth.index(wanted)]
        self.choice.read_begins(peer.instance, now_s)
        done = await self._imports.read(peer, layout, keys[:wanted], self._config.read_s)
        size_bytes = len(done.written) * block_bytes
        if done.fault is not None:
            if done.fault.code == "late" and done.lent:
                self.choice.measure(peer.instance, size_bytes, done.took_s)
            self.choice.failed(peer.instance, self._now())
            return "fault"
        self.choice.read_done(peer.instance, size_bytes, done.took_s)
        return "read" if done.written else "nothing"

    def _warn_of_slow(
        self, layout: LayoutStore, candidates: Sequence[PeerAddress], counts: Sequence[int], left_s: float
    ) -> None:
        least = self._config.least_blocks
        slow = [
            f"{peer.instance}: {self.choice.known[peer.instance].rate / 1e6:.3g} MB/s"
            for peer, count in zip(candidates, counts, strict=True)
            if count >= least and peer.instance in self.choice.known
        ]
        if slow:
            problem = f"{least} blocks do not come in {left_s:.3g} s, so they are not read ({', '.join(slow)})"
            self._imports.faults.warn(f"blocks of peers, layout {layout.digest}", problem)

    async def _ask(self, peer: PeerAddress, layout: LayoutStore, keys: Sequence[ContentKey], limit_s: float) -> int:
        """Return how many leading blocks a peer has; 0 if it does not answer in time."""
        try:
            return await self._imports.road.leading(peer, layout.layout, keys, limit_s)
        except PeerFault as wrong:
            self._imports.count_fault(peer, wrong)
            self.choice.failed(peer.instance, self._now())
            return 0
