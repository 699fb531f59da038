"""Feeds one source's KV events into the index: the shell of `SourceSync`.

    ZMQ batch ─▶ decode ─▶ SourceSync ─▶ ClearBlocks, ApplyBatch ─▶ Chains ─▶ Index
    its report ───────────▶  │                                       │
         │                   └─▶ RequestSnapshot, RequestReplay ─▶ a task each, which reports its result to SourceSync
         └─▶ DigestCheck ◀───────────────────────────────────────────┘

A source is a worker, whose ranks share one stream, or one layout of a kvbm.

Actions are carried out in order and in slices, so that a replay of ten thousand batches does not delay a Select. If too
many actions wait, new batches are dropped. That leaves a gap, which is closed later like any other gap.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import assert_never

from msgspec import Struct

from services.router.config import SourceConfig
from services.router.index import kv_events
from services.router.index.chains import CardMismatch, Chains, SlotCleanup
from services.router.index.index import TIERS
from services.router.index.kv_events import ENGINE_HASH_BITS, DecodedBatch, RemovedEvent, StoredEvent
from services.router.metrics import RouterMetrics
from services.router.sync.digest_check import DigestCheck, DigestResult, Digests
from services.router.sync.snapshots import snapshot_slices
from services.router.sync.source import (
    Action,
    ApplyBatch,
    ClearBlocks,
    RequestReplay,
    RequestSnapshot,
    Silence,
    SourceSync,
)
from shared.errors import ProtocolError, Unavailable
from shared.messages.cards import EventSource
from shared.messages.kv_events import SnapshotRequest
from shared.messages.kvbm import LayoutReport
from shared.messages.load import KvState
from shared.messages.people import SourceState
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.runtime import Runtime

_SLICE_BLOCKS = 2048
_BATCH_COST_BLOCKS = 32
"""Cost of a batch in addition to its blocks, in blocks."""
_DECODED_AT_ONCE = 64
"""Batches of a replay decoded before the loop gets a turn."""

_log = logging.getLogger(__name__)


class SourceOrigin(Struct, frozen=True):
    """The source of an event stream."""

    name: str
    """Its name in logs and status: a worker's instance id, or KVBM/LAYOUT."""
    snapshot_subject: str
    """The subject that answers snapshot requests."""
    layout: str = ""
    """The layout's digest in snapshot requests; empty for a worker."""
    tiers: tuple[int, ...] = (0,)
    """Tiers of which the source keeps digests, as indices into TIERS."""


class EventFeed:
    """Follows one source's event stream until closed. All ranks share the stream and its sequence.

    `trust(usable)` is called when the events no longer show what the source holds, and when they do again.
    """

    def __init__(
        self,
        runtime: Runtime,
        origin: SourceOrigin,
        stream: EventSource,
        chains: Mapping[int, Chains],
        config: SourceConfig,
        metrics: RouterMetrics,
        limited_log: RateLimitedLog,
        *,
        clear_later: Callable[[SlotCleanup], None],
        trust: Callable[[bool], None],
        snapshot_semaphore: asyncio.Semaphore,
    ) -> None:
        self._runtime = runtime
        self._origin = origin
        self._name = origin.name
        self._chains = chains
        self._config = config
        self._metrics = metrics
        self._limited_log = limited_log
        self._clear_later = clear_later
        self._trust = trust
        self._snapshot_semaphore = snapshot_semaphore
        self._now_s = asyncio.get_running_loop().time
        self.stream = stream
        self.source = SourceSync(
            snapshots=stream.snapshot,
            replays=bool(stream.replay),
            epochs=stream.epoch,
            held_limit_batches=config.held_limit_batches,
            stored=stream.stored,
        )
        self.refused = ""
        """Why the events of this source are not used; empty if they are used."""
        self.usable = True
        """Whether the events show what the source holds."""
        digest_s = config.digest_s if stream.digest and stream.epoch else 0.0
        self._checks = {rank: DigestCheck(every_s=digest_s) for rank in chains}
        self._digests: dict[str, int] = {"agreed": 0, "differed": 0, "exempt": 0}
        self._silence = Silence(limit_s=config.silence_s)
        self._gaps = self._rejected = self._dropped = 0
        self._actions: deque[Action] = deque()
        self._next_slice: asyncio.Handle | None = None
        self._closed = False
        self._request: asyncio.Task[None] | None = None
        self._subscription = runtime.events.subscribe(stream, self._receive)
        self._run_actions(self.source.start())

    def load_reported(self, kv: list[KvState]) -> None:
        """Handle a worker's load report, which has the last sequence of its events."""
        if self._closed or not kv:
            return
        self._run_actions(self.source.report_received(max(kv, key=lambda state: (state.epoch, state.sequence))))
        for state in kv:
            self._digest_reported(state, (state.digest,))
        self._compare_digests()

    def layout_reported(self, report: LayoutReport) -> None:
        """Handle a kvbm's report of this layout. A kvbm restarts under another id, so its events have one epoch."""
        if self._closed:
            return
        state = KvState(0, 1, report.sequence)
        self._run_actions(self.source.report_received(state))
        self._digest_reported(state, (report.host_digest, report.disk_digest))
        self._compare_digests()

    def prefill_seen(self, since_s: float) -> None:
        """Record that a request reserved at `since_s` has computed new blocks there and has its first token now."""
        if self._closed:
            return
        self._silence.prefill_seen(since_s, self._now_s())
        if self._silence.silent:
            problem = f"no KV events for {self._config.silence_s:g} s, although requests compute new blocks"
            self._limited_log.warn(f"KV events of {self._name}", problem)
        self._update_trust()

    def status(self) -> SourceState:
        """Return the current state, for users."""
        heard_s = self._silence.last_batch_s
        return SourceState(
            instance=self._name,
            state="refused" if self.refused else self.source.state,
            reason=self.refused,
            partial=self.source.partial,
            exact=all(chains.exact for chains in self._chains.values()),
            silent=self._silence.silent,
            epoch=self.source.epoch,
            applied=self.source.applied,
            gaps=self.source.gaps,
            resyncs=self.source.resyncs,
            rejected=self._rejected,
            torn=self._subscription.malformed,
            dropped=self._dropped,
            digests=dict(self._digests),
            heard_s_ago=None if heard_s is None else self._now_s() - heard_s,
        )

    def close(self) -> None:
        """Stop following; idempotent. The caller cleans up what its chains hold."""
        if self._closed:
            return
        self._closed = True
        self._actions.clear()
        if self._next_slice is not None:
            self._next_slice.cancel()
        self._subscription.close()
        if self._request is not None:
            self._request.cancel()

    # --- batches

    def _receive(self, sequence: int, payload: bytes) -> None:
        if self._closed:
            return
        self._silence.batch_received(self._now_s())
        self._update_trust()
        if len(self._actions) >= self._config.held_limit_batches:
            self._dropped += 1
            self._metrics.events.labels("dropped").inc()
            self._limited_log.warn(
                f"KV event queue of {self._name}",
                f"{len(self._actions)} batches wait to be applied, so new ones are dropped",
            )
            return
        self._run_actions(self.source.batch_received(sequence, self._decode(payload)))

    def _decode(self, payload: bytes) -> DecodedBatch | None:
        try:
            return kv_events.decode(payload)
        except ProtocolError as wrong:
            self._rejected += 1
            self._metrics.events.labels("rejected").inc()
            self._limited_log.warn(f"KV events of {self._name}", wrong)
            return None

    # --- actions

    def _run_actions(self, actions: list[Action]) -> None:
        if self.source.gaps != self._gaps:
            self._metrics.gaps.inc(self.source.gaps - self._gaps)
            self._gaps = self.source.gaps
        clears = any(isinstance(action, ClearBlocks) for action in actions)
        if clears:
            self._actions.clear()  # waiting actions are for chains that are to be cleared
        self._actions.extend(actions)
        if clears or self._next_slice is None:
            self._run_slice()

    def _run_slice(self) -> None:
        """Carry out a slice of the actions; the rest follows in the loop's next turn."""
        if self._next_slice is not None:
            self._next_slice.cancel()
            self._next_slice = None
        left = _SLICE_BLOCKS
        while self._actions and left > 0:
            action = self._actions.popleft()
            left -= _cost_blocks(action)
            self._run_action(action)
        if self._actions:
            self._next_slice = asyncio.get_running_loop().call_soon(self._run_slice)
        else:
            self._compare_digests()

    def _run_action(self, action: Action) -> None:
        match action:
            case ClearBlocks():
                for rank, chains in self._chains.items():
                    self._clear_later(chains.clear())
                    self._checks[rank].chains_cleared()
            case ApplyBatch(batch):
                self._apply(batch)
            case RequestSnapshot():
                self._start_request(self._take_snapshot(action))
            case RequestReplay():
                self._start_request(self._replay(action))
            case _:
                assert_never(action)

    def _apply(self, batch: DecodedBatch) -> None:
        chains = self._chains.get(batch.rank)
        (self._metrics.ignored_events if chains is None or batch.ignored else self._metrics.applied_events).inc()
        if chains is None:
            return
        try:
            for event in batch.events:
                cleanup = chains.apply(event)
                if cleanup is not None:
                    self._clear_later(cleanup)
        except CardMismatch as wrong:
            self._refuse(wrong)

    def _refuse(self, wrong: CardMismatch) -> None:
        """Stop using this source until its card or address changes, because its events contradict the card."""
        self.refused = str(wrong)
        self._metrics.refused_sources.inc()
        _log.error("KV events of %s are refused: %s", self._name, wrong)
        for chains in self._chains.values():
            self._clear_later(chains.clear())
        self.close()
        self._update_trust()

    def _update_trust(self) -> None:
        usable = not (self.refused or self._silence.silent)
        if usable != self.usable:
            self.usable = usable
            self._trust(usable)

    # --- digests

    def _digest_reported(self, state: KvState, digests: Digests) -> None:
        check = self._checks.get(state.rank)
        if check is not None:
            kept = tuple(digest & ENGINE_HASH_BITS for digest in digests)
            self._record_result(state.rank, check.add_source_digest(state.epoch, state.sequence, kept, self._now_s()))

    def _compare_digests(self) -> None:
        """Pass the chains' digests to the open checks. Only if no action waits do the chains match the source's
        sequence."""
        if self._actions or self._closed:
            return
        for rank, check in self._checks.items():
            as_of = self.source.sequence_of(rank) if check.open else None
            if as_of is not None:
                chains = self._chains[rank]
                complete = chains.exact and not self.source.partial
                digests = tuple(map(chains.digest, self._origin.tiers)) if complete else None
                self._record_result(rank, check.add_chains_digest(self.source.epoch, as_of, digests))

    def _record_result(self, rank: int, result: DigestResult | None) -> None:
        if result is None:
            return
        self._digests[result] += 1
        self._metrics.digests.labels(result).inc()
        if result == "differed":
            _log.error("KV events of %s, rank %d: the digests differ; requesting all blocks again", self._name, rank)
            self._run_actions(self.source.digest_differed())

    # --- snapshots and replays

    def _start_request(self, request: Coroutine[None, None, None]) -> None:
        if self._request is not None:
            self._request.cancel()  # the answer to an older request does not count
        self._request = self._runtime.tasks.create_task(request)

    async def _take_snapshot(self, action: RequestSnapshot) -> None:
        await asyncio.sleep(action.after_s)
        try:
            async with self._snapshot_semaphore:
                taken = await self._restore(action.ticket)
        except CardMismatch as wrong:
            self._refuse(wrong)
            return
        except (Unavailable, ProtocolError) as wrong:
            self._metrics.snapshots.labels("failed").inc()
            self._limited_log.warn(f"snapshot of {self._name}", wrong)
            self._run_actions(self.source.request_failed(action.ticket))
            return
        if taken is not None:
            self._metrics.snapshots.labels("taken").inc()
            epoch, sequences = taken
            self._run_actions(self.source.snapshot_restored(action.ticket, epoch, sequences))

    async def _restore(self, ticket: int) -> tuple[int, dict[int, int]] | None:
        """Add the blocks of every rank to its chains. Return the epoch and each rank's sequence, or None if the request
        is no longer current."""
        epoch: int | None = None
        sequences: dict[int, int] = {}
        for rank, chains in self._chains.items():
            asked = SnapshotRequest(rank, self._origin.layout)
            answer = snapshot_slices(
                self._runtime.bus,
                self._origin.snapshot_subject,
                asked,
                idle_timeout_s=self._config.snapshot_idle_timeout_s,
            )
            async with aclosing(answer) as parts:
                async for part in parts:
                    if not self.source.is_current(ticket):
                        return None
                    if epoch is None:
                        self._run_actions(self.source.snapshot_started(ticket))
                        epoch = part.epoch
                    if part.epoch != epoch:
                        raise ProtocolError("the engine restarted between the snapshots of two ranks")
                    chains.restore_snapshot(part.blocks, TIERS.index(part.tier))
                    sequences[rank] = part.sequence
        return (epoch, sequences) if epoch is not None and self.source.is_current(ticket) else None

    async def _replay(self, action: RequestReplay) -> None:
        await asyncio.sleep(action.after_s)
        try:
            raw = await self._subscription.replay(action.first, timeout_s=self._config.replay_timeout_s)
        except (Unavailable, ProtocolError) as wrong:
            self._metrics.replays.labels("failed").inc()
            self._limited_log.warn(f"replay of {self._name}", wrong)
            self._run_actions(self.source.request_failed(action.ticket))
            return
        batches: list[tuple[int, DecodedBatch | None]] = []
        for sequence, payload in raw:
            batches.append((sequence, self._decode(payload)))
            if len(batches) % _DECODED_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._metrics.replays.labels("done").inc()
        self._run_actions(self.source.replay_received(action.ticket, batches))


def _cost_blocks(action: Action) -> int:
    """Return the cost of an action for the loop, in blocks."""
    if not isinstance(action, ApplyBatch):
        return _BATCH_COST_BLOCKS
    changes = (event for event in action.batch.events if isinstance(event, StoredEvent | RemovedEvent))
    return _BATCH_COST_BLOCKS + sum(len(event.hashes) for event in changes)
