"""One instance's KV events on their way into the index: carries out what `Source` decides.

    ZMQ batch ─▶ decode ─▶ Source ─▶ Clear, Apply ─▶ Chains ─▶ Index
    load report ──────────▶  │
                             └─▶ TakeSnapshot, Replay ─▶ a task each, which tells the Source how it went

Actions are carried out in order and in slices, so that a replay of ten thousand batches does not stall a choice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import assert_never

from services.router import events
from services.router.chains import Chains, Clearing, Mismatch
from services.router.config import SourceConfig
from services.router.events import Batch
from services.router.metrics import Metrics
from services.router.seldom import Seldom
from services.router.sources import Action, Apply, Clear, Replay, Source, TakeSnapshot
from shared import subjects
from shared.errors import ProtocolError, Unavailable
from shared.lifecycle import Runtime
from shared.messages import SNAPSHOT_CHUNK, SNAPSHOT_REQUEST, EventSource, KvState, SnapshotRequest

_SLICE_BATCHES = 64
_SLICE_BLOCKS = 256

_log = logging.getLogger(__name__)


class Feed:
    """Follows one instance's event stream until closed. All ranks share the stream and its sequence."""

    def __init__(
        self,
        runtime: Runtime,
        instance: str,
        stream: EventSource,
        chains: Mapping[int, Chains],
        config: SourceConfig,
        metrics: Metrics,
        seldom: Seldom,
        clear_later: Callable[[Clearing], None],
    ) -> None:
        self._runtime = runtime
        self._instance = instance
        self._chains = chains
        self._config = config
        self._metrics = metrics
        self._seldom = seldom
        self._clear_later = clear_later
        self.stream = stream
        self.source = Source(
            snapshots=stream.snapshot,
            replays=bool(stream.replay),
            epochs=stream.epoch,
            held_limit_batches=config.held_limit_batches,
        )
        self.refused = ""
        """Why nothing of this source is used; empty: it is."""
        self._gaps = 0
        self._actions: deque[Action] = deque()
        self._working = False
        self._closed = False
        self._asking: set[asyncio.Task[None]] = set()
        self._subscription = runtime.events.subscribe(stream, self._receive)
        self._perform(self.source.start())

    def reported(self, kv: list[KvState]) -> None:
        """The instance's load report; it tells how far its events are."""
        if kv and not self._closed:
            self._perform(self.source.reported(kv[0]))

    def close(self) -> None:
        """The instance is gone, or refused. What its chains hold is the caller's. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._actions.clear()
        self._subscription.close()
        for task in self._asking:
            task.cancel()

    # --- batches

    def _receive(self, sequence: int, payload: bytes) -> None:
        if not self._closed:
            self._perform(self.source.heard(sequence, self._decode(payload)))

    def _decode(self, payload: bytes) -> Batch | None:
        try:
            return events.decode(payload)
        except ProtocolError as wrong:
            self._reject(wrong)
            return None

    def _reject(self, wrong: ProtocolError) -> None:
        self._metrics.events.labels("rejected").inc()
        self._seldom.warn(f"KV events of {self._instance}", wrong)

    # --- actions

    def _perform(self, actions: list[Action]) -> None:
        self._metrics.gaps.inc(self.source.gaps - self._gaps)
        self._gaps = self.source.gaps
        self._actions.extend(actions)
        if not self._working:
            self._work()

    def _work(self) -> None:
        """A slice of the actions; the rest in the loop's next turn."""
        self._working = False
        for _ in range(min(len(self._actions), _SLICE_BATCHES)):
            self._act(self._actions.popleft())
            if self._closed:
                return
        if self._actions:
            self._working = True
            asyncio.get_running_loop().call_soon(self._work)

    def _act(self, action: Action) -> None:
        match action:
            case Clear():
                for chains in self._chains.values():
                    self._clear_later(chains.clear())
            case Apply(batch):
                self._apply(batch)
            case TakeSnapshot():
                self._ask(self._take_snapshot(action))
            case Replay():
                self._ask(self._replay(action))
            case _:
                assert_never(action)

    def _apply(self, batch: Batch) -> None:
        chains = self._chains.get(batch.rank)
        self._metrics.events.labels("applied" if chains is not None and not batch.ignored else "ignored").inc()
        if chains is None:
            return
        try:
            for event in batch.events:
                clearing = chains.apply(event)
                if clearing is not None:
                    self._clear_later(clearing)
        except Mismatch as wrong:
            self._refuse(wrong)

    def _refuse(self, wrong: Mismatch) -> None:
        """Nothing this source says can be used: it is left alone until its card or address changes."""
        self.refused = str(wrong)
        self._metrics.refused_sources.inc()
        _log.error("KV events of %s are refused: %s", self._instance, wrong)
        for chains in self._chains.values():
            self._clear_later(chains.clear())
        self.close()

    # --- questions

    def _ask(self, question: Coroutine[None, None, None]) -> None:
        task = self._runtime.tasks.create_task(question)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _take_snapshot(self, action: TakeSnapshot) -> None:
        await asyncio.sleep(action.after_s)
        try:
            taken = await self._restore(action.ticket)
        except Mismatch as wrong:
            self._refuse(wrong)
            return
        except (Unavailable, ProtocolError) as wrong:
            self._metrics.snapshots.labels("failed").inc()
            self._seldom.warn(f"snapshot of {self._instance}", wrong)
            self._perform(self.source.failed(action.ticket))
            return
        if taken is not None:
            self._metrics.snapshots.labels("taken").inc()
            epoch, sequence = taken
            self._perform(self.source.snapshot_taken(action.ticket, epoch, sequence))

    async def _restore(self, ticket: int) -> tuple[int, int] | None:
        """The snapshot's blocks into the chains; its (epoch, sequence), None if it is not wanted any more."""
        subject = subjects.worker(self._runtime.namespace, self._instance, "snapshot")
        question = SNAPSHOT_REQUEST.encode(SnapshotRequest())
        idle_timeout_s = self._config.snapshot_idle_timeout_s
        mark: tuple[int, int] | None = None
        async with self._runtime.bus.stream(subject, question, idle_timeout_s=idle_timeout_s) as chunks:
            async for message in chunks:
                chunk = SNAPSHOT_CHUNK.decode(message.payload)
                if mark is not None and mark != (chunk.epoch, chunk.sequence):
                    raise ProtocolError("chunks of different snapshots")
                mark = chunk.epoch, chunk.sequence
                for start in range(0, len(chunk.blocks), _SLICE_BLOCKS):
                    if not self.source.awaits(ticket):
                        return None
                    self._chains[0].restore(chunk.blocks[start : start + _SLICE_BLOCKS])
                    await asyncio.sleep(0)
                if chunk.last:
                    return mark if self.source.awaits(ticket) else None
        raise ProtocolError("a snapshot without an end")

    async def _replay(self, action: Replay) -> None:
        await asyncio.sleep(action.after_s)
        try:
            raw = await self._subscription.replay(action.first, timeout_s=self._config.replay_timeout_s)
        except (Unavailable, ProtocolError) as wrong:
            self._metrics.replays.labels("failed").inc()
            self._seldom.warn(f"replay of {self._instance}", wrong)
            self._perform(self.source.failed(action.ticket))
            return
        batches: list[tuple[int, Batch | None]] = []
        for sequence, payload in raw:
            batches.append((sequence, self._decode(payload)))
            if len(batches) % _SLICE_BATCHES == 0:
                await asyncio.sleep(0)
        self._metrics.replays.labels("done").inc()
        self._perform(self.source.replayed(action.ticket, batches))
