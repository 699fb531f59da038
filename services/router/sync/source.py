"""What to do about one stream of KV events: when to apply, replay, take a snapshot or start over. Pure.

                     ┌────────────── a new epoch, a sequence that goes backwards ──────────────┐
                     ▼                                                                         │
    start ──▶ syncing ───── snapshot (or what replay has) is in, held batches follow ─────▶ live
                ▲ ▲  │ failed: again, later                                            │  ▲    │ a gap, or a
                │ │  └──┘                                                              │  │    │ report that is
                │ └────────────────────── a digest that differs ───────────────────────┘  │    ▼ ahead of us
                └─────────────── the source has no such batches any more ────────────── replaying

Batches that come while syncing or replaying are held, up to a bound; what is dropped at the bound is a gap later,
and heals as one. Answers carry the ticket of the question; those of an older question are ignored.

What is known stays until something better is there: a source is cleared when the answer comes, not when the question
is asked, so that an outage costs nothing. Only an engine that began anew, or that has given no answer for long, is
cleared at once.

A source with snapshots starts from one, of each rank. A source without (a plain vLLM) is rebuilt from what its replay
still has, and is *partial* unless that reaches back to its first batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from services.router.index.kv_events import DecodedBatch
from shared.messages import KvState

State = Literal["syncing", "live", "replaying"]

STALE_FAILURES = 16
"""Failed answers in a row, about two minutes of them, after which what was known is given up."""


class ClearBlocks(Struct, frozen=True):
    """Forget all blocks of this source."""


class ApplyBatch(Struct, frozen=True):
    """Apply one batch to the chains."""

    batch: DecodedBatch


class RequestSnapshot(Struct, frozen=True):
    """Ask the source for the blocks of each rank after `after_s`; answer with `snapshot_begins` when the first come,
    then with `snapshot_taken`, or with `failed`."""

    ticket: int
    after_s: float


class RequestReplay(Struct, frozen=True):
    """Ask the source for the batches from `first` on, after `after_s`; answer with `replayed` or `failed`."""

    ticket: int
    first: int
    after_s: float


Action = ClearBlocks | ApplyBatch | RequestSnapshot | RequestReplay


class SourceSync:
    """One event stream. Every method that tells it something returns what to do now, in order."""

    def __init__(
        self,
        *,
        snapshots: bool,
        replays: bool,
        epochs: bool,
        held_limit_batches: int,
        retry_first_s: float = 0.2,
        retry_most_s: float = 10.0,
    ) -> None:
        self._snapshots = snapshots
        self._replays = replays
        self._epochs = epochs
        self._held_limit_batches = held_limit_batches
        self._retry_first_s = retry_first_s
        self._retry_most_s = retry_most_s
        self.state: State = "syncing"
        self.partial = False
        """Blocks stored before we listened may be unknown."""
        self.epoch: int | None = None
        """Of the engine's start; None: not told yet."""
        self.applied = -1
        """Sequence of the last batch that the chains have."""
        self.gaps = 0
        """Gaps seen since the start."""
        self.resyncs = 0
        """How often everything was asked for again, since the start."""
        self._restored: dict[int, int] = {}
        """Rank → the sequence its snapshot was taken at, where that is later than the first rank's."""
        self._applied_time_s: float | None = None
        """The engine's clock in the last applied batch."""
        self._heard = -1
        """Sequence of the last batch that came by itself, not by replay."""
        self._heard_time_s: float | None = None
        """The engine's clock in it."""
        self._reported = -1
        """Sequence in the last load report."""
        self._applied_at_report = -1
        """`applied` when the last load report came."""
        self._held: dict[int, DecodedBatch | None] = {}
        self._ticket = 0
        self._failures = 0

    # --- what it is told

    def start(self) -> list[Action]:
        """The subscription stands; nothing is known."""
        return self._resync()

    def batch_received(self, sequence: int, batch: DecodedBatch | None) -> list[Action]:
        """A batch came by itself. None: it could not be decoded; its sequence counts all the same."""
        if self._is_repeat(sequence, batch):
            return []
        if sequence <= self._heard or self._is_older_start(sequence, batch):
            return self._restart(None, sequence, batch)
        self._heard = sequence
        self._heard_time_s = batch.time_s if batch is not None else self._heard_time_s
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
        """A load report. Being behind the report before it means that the tail was lost; having been ahead of it
        since the one before means that we applied what this engine never sent."""
        if self._epochs:
            if self.epoch is not None and kv.epoch != self.epoch:
                return self._restart(kv.epoch, None, None)
            self._set_epoch(kv.epoch)
        if self.state != "live":
            self._reported = kv.sequence
            return []
        if kv.sequence < self.applied == self._applied_at_report:
            return self._restart(kv.epoch if self._epochs else None, None, None)
        behind = self.applied < self._reported
        self._reported = kv.sequence
        self._applied_at_report = self.applied
        return self._close_gap() if behind else []

    def snapshot_started(self, ticket: int) -> list[Action]:
        """The first blocks of the snapshot are here, and not in the chains yet."""
        return [ClearBlocks()] if ticket == self._ticket else []

    def snapshot_restored(self, ticket: int, epoch: int, sequences: Mapping[int, int]) -> list[Action]:
        """All blocks of the snapshots are in the chains; rank → the sequence that its snapshot was taken at."""
        if ticket != self._ticket:
            return []
        if self._epochs:
            self._set_epoch(epoch)
        self.partial = False
        first = min(sequences.values())
        self._restored = {rank: sequence for rank, sequence in sequences.items() if sequence > first}
        return self._go_live(first, None)

    def replay_received(self, ticket: int, batches: list[tuple[int, DecodedBatch | None]]) -> list[Action]:
        """What the source still has, in order."""
        if ticket != self._ticket:
            return []
        if self.state == "replaying":
            return self._fill_gap(batches)
        first = min([sequence for sequence, _ in batches] + list(self._held), default=0)
        self.partial = first > 0
        return [ClearBlocks(), *self._go_live(first - 1, batches)]

    def request_failed(self, ticket: int) -> list[Action]:
        """The question was not answered, or not with sense."""
        if ticket != self._ticket:
            return []
        return self._resync(clear=self._failures >= STALE_FAILURES)

    def digest_differed(self) -> list[Action]:
        """A digest differs: the chains are not what the source holds."""
        return self._resync()

    def sequence_of(self, rank: int) -> int | None:
        """The sequence that a rank's chains stand at once all actions are carried out; None: at none."""
        return None if self.state == "syncing" else max(self.applied, self._restored.get(rank, -1))

    def is_current(self, ticket: int) -> bool:
        """Whether the answer to this question still counts."""
        return ticket == self._ticket

    # --- transitions

    def _resync(self, *, clear: bool = False) -> list[Action]:
        """→ syncing: everything is asked for again."""
        after_s = 0.0
        if self._failures:
            after_s = min(self._retry_first_s * 2 ** (self._failures - 1), self._retry_most_s)
        self._failures = min(self._failures + 1, 32)
        self.resyncs += 1
        self.state = "syncing"
        self.applied = -1
        self._restored = {}
        self._applied_time_s = None
        self._ticket += 1
        cleared: list[Action] = [ClearBlocks()] if clear else []
        if self._snapshots:
            # What came before the question is in the snapshot, or of an engine that is gone.
            self._held.clear()
            return [*cleared, RequestSnapshot(self._ticket, after_s)]
        if self._replays:
            return [*cleared, RequestReplay(self._ticket, 0, after_s)]
        first = min(self._held, default=self._heard + 1)
        self.partial = first > 0
        return [ClearBlocks(), *self._go_live(first - 1, None)]

    def _restart(self, epoch: int | None, sequence: int | None, batch: DecodedBatch | None) -> list[Action]:
        """The engine began anew: nothing of what was held or heard counts any more."""
        self._held.clear()
        self.applied = self._heard = self._reported = self._applied_at_report = -1
        self.epoch = epoch
        self._heard_time_s = None
        if sequence is not None:
            self._heard = sequence
            self._heard_time_s = batch.time_s if batch is not None else None
            self._hold(sequence, batch)
        return self._resync(clear=True)

    def _set_epoch(self, epoch: int) -> None:
        """The engine's start is known now. What was held under another, or none, may be a former engine's; if it was
        not, it is a gap that a replay fills."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._held.clear()

    def _go_live(self, applied: int, batches: list[tuple[int, DecodedBatch | None]] | None) -> list[Action]:
        """syncing → live: the chains are as of `applied`; what follows is applied."""
        self.state = "live"
        self.applied = applied
        for sequence, batch in batches or ():
            self._hold(sequence, batch, bounded=False)
        return self._apply_held()

    def _fill_gap(self, batches: list[tuple[int, DecodedBatch | None]]) -> list[Action]:
        """replaying → live, if the gap is closed; the source that cannot close it is asked for everything."""
        wanted = self.applied + 1
        for sequence, batch in batches:
            self._hold(sequence, batch, bounded=False)
        if wanted not in self._held:
            # Nothing to fill a gap with: either it was none (a report from before our last batch), or it is too old.
            behind = max([*self._held, self._reported], default=-1)
            if behind >= wanted:
                return self._resync()
        self.state = "live"
        return self._apply_held()

    def _apply_held(self) -> list[Action]:
        """Apply what is held and next in line; what is left over then is behind a new gap."""
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
        """live → replaying, or → syncing where nothing can be replayed."""
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
            # With snapshots a digest tells what is missing; without, nothing will.
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
        """Whether a batch comes twice, or late: its clock is not later, as that of an engine that began anew is.
        Without epochs nobody else would tell of a new start behind a clock that was set back: then the same batch only.
        """
        if sequence > self._heard or batch is None or self._heard_time_s is None:
            return False
        if self._epochs:
            return batch.time_s <= self._heard_time_s
        return sequence == self._heard and batch.time_s == self._heard_time_s

    def _is_older_start(self, sequence: int, batch: DecodedBatch | None) -> bool:
        """Whether a batch that we have by replay comes again with a later clock: then it is another engine's."""
        if self.state == "syncing" or sequence > self.applied or batch is None:
            return False
        return self._applied_time_s is not None and batch.time_s > self._applied_time_s

    def validate(self) -> None:
        """Assert every invariant."""
        assert self.state != "live" or not self._held, "live means that nothing waits"
        assert self.state == "syncing" or all(sequence > self.applied for sequence in self._held)
        assert self.state != "replaying" or self._replays
