"""Decides when to apply, replay, request a snapshot or start over, for one stream of KV events. Pure.

                     ┌────────────── a new epoch, a sequence that goes backwards ──────────────┐
                     ▼                                                                         │
    start ──▶ syncing ───── snapshot (or replay) is in, held batches follow ──────────────▶ live
                ▲ ▲  │ failed: again, later                                            │  ▲    │ a gap, or a
                │ │  └──┘                                                              │  │    │ report that is
                │ └────────────────────── a digest that differs ───────────────────────┘  │    ▼ ahead of us
                └─────────────── the source no longer has these batches ─────────────── replaying

Batches that come while syncing or replaying are held, up to a limit. A batch dropped at the limit is a gap later, and
is closed like any other gap. Answers carry the ticket of their request; answers to older requests are ignored.

Known blocks stay until a better answer comes: a source is cleared when the answer arrives, not when it is requested, so
that an outage costs nothing. A source is cleared at once only if its engine restarted, or if it has not answered for
long.

A source with snapshots starts from a snapshot of each rank. A source without them (plain vLLM) is rebuilt from the
batches that its replay still has, and is *partial* unless they reach back to its first batch. If a snapshot fails and
replays need no source, because a stream keeps the batches, they take its place where they reach back so far and none
is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from services.router.index.kv_events import DecodedBatch
from shared.messages.load import KvState

State = Literal["syncing", "live", "replaying"]

FIRST_DELAY_S, LAST_DELAY_S = 0.2, 10.0
"""Seconds until all blocks are requested again after a failed answer: the first delay, which doubles, and the last."""
STALE_FAILURES = 16
"""Number of failed answers in a row, taking about two minutes, after which known blocks are given up."""


class ClearBlocks(Struct, frozen=True):
    """Forget all blocks of this source."""


class ApplyBatch(Struct, frozen=True):
    """Apply one batch to the chains."""

    batch: DecodedBatch


class RequestSnapshot(Struct, frozen=True):
    """Request the blocks of each rank after `after_s` seconds. Call `snapshot_started` when the first come, then
    `snapshot_restored`, or `request_failed`."""

    ticket: int
    after_s: float


class RequestReplay(Struct, frozen=True):
    """Request the batches from `first` on after `after_s` seconds. Call `replay_received` or `request_failed`."""

    ticket: int
    first: int
    after_s: float


Action = ClearBlocks | ApplyBatch | RequestSnapshot | RequestReplay


class SourceSync:
    """The state of one event stream. Every event method returns the actions to carry out now, in order."""

    def __init__(
        self,
        *,
        snapshots: bool,
        replays: bool,
        epochs: bool,
        held_limit_batches: int,
        stored: bool = False,
    ) -> None:
        """`stored`: a stream answers for replays, and not the source."""
        self._snapshots = snapshots
        self._replays = replays
        self._stored = stored
        self._rereading = False
        """Whether all batches were requested from the stream, since the source does not answer."""
        self._epochs = epochs
        self._held_limit_batches = held_limit_batches
        self.state: State = "syncing"
        self.partial = False
        """Whether blocks stored before the subscription may be unknown."""
        self.epoch: int | None = None
        """Epoch of the engine's start; None if unknown."""
        self.applied = -1
        """Sequence of the last batch that the chains have."""
        self.gaps = 0
        """Number of gaps since the start."""
        self.resyncs = 0
        """Number of times that all blocks were requested again since the start."""
        self._restored: dict[int, int] = {}
        """Rank → the sequence of its snapshot, if that is later than the first rank's."""
        self._applied_time_s: float | None = None
        """The engine's clock in the last applied batch."""
        self._last_received = -1
        """Sequence of the last batch that came by itself, not by replay."""
        self._last_received_time_s: float | None = None
        """The engine's clock in that batch."""
        self._reported = -1
        """Sequence in the last load report."""
        self._applied_at_report = -1
        """Value of `applied` when the last load report came."""
        self._held: dict[int, DecodedBatch | None] = {}
        self._ticket = 0
        self._failures = 0

    # --- events

    def start(self) -> list[Action]:
        """The subscription is open; no block is known."""
        return self._resync()

    def batch_received(self, sequence: int, batch: DecodedBatch | None) -> list[Action]:
        """A batch came by itself. None if it could not be decoded; its sequence counts all the same."""
        if self._is_repeat(sequence, batch):
            return []
        if sequence <= self._last_received or self._is_older_start(sequence, batch):
            return self._restart(None, sequence, batch)
        self._last_received = sequence
        self._last_received_time_s = batch.time_s if batch is not None else self._last_received_time_s
        if sequence <= self.applied and self.state != "syncing":
            return []
        if self.state != "live":
            self._hold(sequence, batch)
            return []
        if sequence == self.applied + 1:
            return self._apply(sequence, batch)
        self._hold(sequence, batch)
        return self._close_gap()

    def report_received(self, kv: KvState) -> list[Action]:
        """A load report came. If batches up to the report before it are still missing, they were lost. If we were ahead
        of it already when the report before it came, we have applied batches that this engine never sent."""
        if self._epochs:
            if self.epoch is not None and kv.epoch != self.epoch:
                return self._restart(kv.epoch, None, None)
            self._set_epoch(kv.epoch)
        if self.state != "live":
            self._reported = kv.sequence
            return []
        if kv.sequence < self.applied == self._applied_at_report:
            return self._restart(kv.epoch if self._epochs else None, None, None)
        lost = self.applied < self._reported
        self._reported = kv.sequence
        self._applied_at_report = self.applied
        return self._close_gap() if lost else []

    def snapshot_started(self, ticket: int) -> list[Action]:
        """The first blocks of the snapshot are here, and not in the chains yet."""
        return [ClearBlocks()] if ticket == self._ticket else []

    def snapshot_restored(self, ticket: int, epoch: int, sequences: Mapping[int, int]) -> list[Action]:
        """All blocks of the snapshots are in the chains; `sequences` maps each rank to the sequence of its snapshot."""
        if ticket != self._ticket:
            return []
        if self._epochs:
            self._set_epoch(epoch)
        self.partial = False
        first = min(sequences.values())
        self._restored = {rank: sequence for rank, sequence in sequences.items() if sequence > first}
        return self._go_live(first, None)

    def replay_received(self, ticket: int, batches: list[tuple[int, DecodedBatch | None]]) -> list[Action]:
        """The batches that the source still has came, in order."""
        if ticket != self._ticket:
            return []
        if self.state == "replaying":
            return self._fill_gap(batches)
        if self._snapshots and (not batches or [sequence for sequence, _ in batches] != list(range(len(batches)))):
            return self._resync(clear=self._failures >= STALE_FAILURES)
        first = min([sequence for sequence, _ in batches] + list(self._held), default=0)
        self.partial = first > 0
        return [ClearBlocks(), *self._go_live(first - 1, batches)]

    def request_failed(self, ticket: int) -> list[Action]:
        """The request got no answer, or an invalid one."""
        if ticket != self._ticket:
            return []
        if self._stored and self._snapshots and self.state == "syncing" and not self._rereading:
            self._rereading = True
            self._ticket += 1
            return [RequestReplay(self._ticket, 0, 0.0)]
        return self._resync(clear=self._failures >= STALE_FAILURES)

    def digest_differed(self) -> list[Action]:
        """A digest differs: the chains do not match what the source holds."""
        return self._resync()

    def sequence_of(self, rank: int) -> int | None:
        """Return the sequence that a rank's chains reach when all actions are carried out; None while syncing."""
        return None if self.state == "syncing" else max(self.applied, self._restored.get(rank, -1))

    def is_current(self, ticket: int) -> bool:
        """Return whether the answer to this request still counts."""
        return ticket == self._ticket

    # --- transitions

    def _resync(self, *, clear: bool = False) -> list[Action]:
        """→ syncing: request all blocks again."""
        after_s = 0.0
        if self._failures:
            after_s = min(FIRST_DELAY_S * 2 ** (self._failures - 1), LAST_DELAY_S)
        self._failures = min(self._failures + 1, 32)
        self.resyncs += 1
        self.state = "syncing"
        self._rereading = False
        self.applied = -1
        self._restored = {}
        self._applied_time_s = None
        self._ticket += 1
        cleared: list[Action] = [ClearBlocks()] if clear else []
        if self._snapshots:
            # Batches before the request are in the snapshot, or are of an engine that is gone.
            self._held.clear()
            return [*cleared, RequestSnapshot(self._ticket, after_s)]
        if self._replays:
            return [*cleared, RequestReplay(self._ticket, 0, after_s)]
        first = min(self._held, default=self._last_received + 1)
        self.partial = first > 0
        return [ClearBlocks(), *self._go_live(first - 1, None)]

    def _restart(self, epoch: int | None, sequence: int | None, batch: DecodedBatch | None) -> list[Action]:
        """The engine restarted: batches held or received before do not count."""
        self._held.clear()
        self.applied = self._last_received = self._reported = self._applied_at_report = -1
        self.epoch = epoch
        self._last_received_time_s = None
        if sequence is not None:
            self._last_received = sequence
            self._last_received_time_s = batch.time_s if batch is not None else None
            self._hold(sequence, batch)
        return self._resync(clear=True)

    def _set_epoch(self, epoch: int) -> None:
        """Set the epoch, now that the engine's start is known. Held batches of another or unknown epoch may be of an
        earlier engine, so they are dropped; if they were not, a replay fills that gap."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._held.clear()

    def _go_live(self, applied: int, batches: list[tuple[int, DecodedBatch | None]] | None) -> list[Action]:
        """syncing → live: the chains are as of `applied`; later batches are applied."""
        self.state = "live"
        self._rereading = False
        self.applied = applied
        for sequence, batch in batches or ():
            self._hold(sequence, batch, bounded=False)
        return self._apply_held()

    def _fill_gap(self, batches: list[tuple[int, DecodedBatch | None]]) -> list[Action]:
        """replaying → live, if the gap is closed; → syncing if the source cannot close it."""
        wanted = self.applied + 1
        for sequence, batch in batches:
            self._hold(sequence, batch, bounded=False)
        if wanted not in self._held:
            # The replay does not fill the gap. Either there was none (a report from before our last batch), or it is
            # too old.
            latest = max([*self._held, self._reported], default=-1)
            if latest >= wanted:
                return self._resync()
        self.state = "live"
        return self._apply_held()

    def _apply_held(self) -> list[Action]:
        """Apply the held batches that are next in line; batches left over are after a new gap."""
        actions: list[Action] = []
        for sequence in [held for held in self._held if held <= self.applied]:
            del self._held[sequence]
        while self.applied + 1 in self._held:
            sequence = self.applied + 1
            actions += self._apply(sequence, self._held.pop(sequence))
        if self._held:
            return actions + self._close_gap()
        return actions

    def _close_gap(self) -> list[Action]:
        """live → replaying, or → syncing if the source has no replay."""
        self.gaps += 1
        if not self._replays:
            return self._resync()
        self.state = "replaying"
        self._ticket += 1
        return [RequestReplay(self._ticket, self.applied + 1, 0.0)]

    def _apply(self, sequence: int, batch: DecodedBatch | None) -> list[Action]:
        self.applied = sequence
        self._failures = 0
        if batch is None:
            # With snapshots, a digest will show what is missing; without, it stays missing.
            self.partial = self.partial or not self._snapshots
            return []
        self._applied_time_s = batch.time_s
        if sequence <= self._restored.get(batch.rank, -1):
            return []
        return [ApplyBatch(batch)]

    def _hold(self, sequence: int, batch: DecodedBatch | None, *, bounded: bool = True) -> None:
        if sequence > self.applied and (not bounded or len(self._held) < self._held_limit_batches):
            self._held[sequence] = batch

    def _is_repeat(self, sequence: int, batch: DecodedBatch | None) -> bool:
        """Return whether a batch comes twice or late. Its clock is then not later, unlike that of an engine that
        restarted. Without epochs, a restart with the clock set back would go unnoticed: then only the same batch is a
        repeat."""
        if sequence > self._last_received or batch is None or self._last_received_time_s is None:
            return False
        if self._epochs:
            return batch.time_s <= self._last_received_time_s
        return sequence == self._last_received and batch.time_s == self._last_received_time_s

    def _is_older_start(self, sequence: int, batch: DecodedBatch | None) -> bool:
        """Return whether a batch that we have by replay comes again with a later clock: then it is of another
        engine."""
        if self.state == "syncing" or sequence > self.applied or batch is None:
            return False
        return self._applied_time_s is not None and batch.time_s > self._applied_time_s

    def validate(self) -> None:
        """Assert every invariant."""
        assert self.state != "live" or not self._held, "batches are held while live"
        assert self.state == "syncing" or all(sequence > self.applied for sequence in self._held)
        assert self.state != "replaying" or self._replays
        assert not self._rereading or self.state == "syncing"


class Silence:
    """Detects a source that sends no events while requests compute blocks there: a wrong port, or events disabled.
    Times are seconds on a monotonic clock; `limit_s` 0 disables it.

    heard ──a request computed new blocks, and no batch came──▶ suspected ──again, `limit_s` later──▶ silent
      ▲                                                             │                                   │
      └──────────────────────── a batch comes ──────────────────────┴───────────────────────────────────┘

    A worker sends the events of a prompt's blocks before its first token, so a batch comes between the reservation and
    the first token. An idle source, or one whose prompts are all cached, is therefore never suspected. One lost batch
    is not enough either: it takes requests `limit_s` apart, and no batch from the first to the last of them.
    """

    def __init__(self, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._suspected_s: float | None = None
        """When the first request was prefilled without a batch; None if there is none."""
        self.last_batch_s: float | None = None
        """When the last batch came by itself, not by replay; None if none came yet."""
        self.silent = False

    def batch_received(self, now_s: float) -> None:
        """Record a batch that came by itself."""
        self.last_batch_s = now_s
        self._suspected_s = None
        self.silent = False

    def prefill_seen(self, since_s: float, now_s: float) -> None:
        """Record a request, reserved at `since_s`, that computed at least one full block and has its first token
        now."""
        if not self._limit_s or (self.last_batch_s is not None and self.last_batch_s >= since_s):
            return
        if self._suspected_s is None:
            self._suspected_s = now_s
        self.silent = now_s - self._suspected_s >= self._limit_s

    def validate(self) -> None:
        """Assert every invariant."""
        assert not self.silent or self._suspected_s is not None
